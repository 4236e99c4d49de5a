// From the description of a matrix to its weights.
// SPDX-License-Identifier: Apache-2.0
#include "analysis/block_weights.h"
#include "analysis/factor_weights.h"
#include "analysis/score_weights.h"

namespace lln::analysis {
namespace {

std::unique_ptr<Weights> feature_weights(const AttentionMatrix& matrix, Parallel* parallel,
                                         std::unique_ptr<Exponents> q,
                                         std::unique_ptr<Exponents> k) {
  const std::int64_t tokens = matrix.q.shape[2];
  if (matrix.causal) {
    return std::make_unique<CausalFeatureWeights>(tokens, std::move(q), std::move(k));
  }
  return std::make_unique<FeatureWeights>(tokens, std::move(q), std::move(k), parallel);
}

std::unique_ptr<Weights> lln_weights(const AttentionMatrix& matrix, Parallel* parallel) {
  return feature_weights(matrix, parallel,
                         map_exponents(matrix.q, matrix.alpha, matrix.feature, matrix.power),
                         map_exponents(matrix.k, matrix.beta, matrix.feature, matrix.power));
}

}  // namespace

std::unique_ptr<Weights> make_weights(const AttentionMatrix& matrix, Parallel* parallel) {
  switch (matrix.kind) {
    case MatrixKind::softmax:
      return std::make_unique<SoftmaxWeights>(matrix);
    case MatrixKind::lln:
      return lln_weights(matrix, parallel);
    case MatrixKind::diag:
      return std::make_unique<DiagWeights>(matrix);
    case MatrixKind::lln_diag:
      return std::make_unique<MixedWeights>(lln_weights(matrix, parallel),
                                            std::make_unique<DiagWeights>(matrix), matrix.mix);
    case MatrixKind::quadratic:
      return std::make_unique<QuadraticWeights>(matrix);
    case MatrixKind::performer: {
      PerformerFeatures features = performer_exponents(matrix);
      return feature_weights(matrix, parallel, std::move(features.q), std::move(features.k));
    }
    case MatrixKind::linear:
      return std::make_unique<LinearWeights>(matrix);
    case MatrixKind::given:
      return std::make_unique<GivenWeights>(matrix);
  }
  return nullptr;
}

}  // namespace lln::analysis
