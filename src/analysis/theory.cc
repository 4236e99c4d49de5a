// Predictions for softmax and LLN from second moments alone; derived in docs/theory.md.
// SPDX-License-Identifier: Apache-2.0
#include "analysis/theory.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace lln::analysis {
namespace {

// |lambda_2| of a stochastic matrix of n independent rows whose entries have this variance against
// their mean 1/n: the radius of the circular law.
double circular_radius(double relative_variance, double n) {
  return std::min(1.0, std::sqrt(std::max(0.0, relative_variance) / n));
}

// The verdict calls a matrix unbiased when |lambda_2| is at least this share of that radius.
constexpr double kShareOfRadius = 0.25;

}  // namespace

Theory predict(const AttentionMatrix& matrix, const InputStatistics& inputs,
               const RowStatistics* rows, const Spectrum* spectrum,
               const InstrumentOptions& options) {
  Theory out;
  const bool is_lln = matrix.kind == MatrixKind::lln && matrix.feature == Feature::exp;
  if (matrix.causal || (!is_lln && matrix.kind != MatrixKind::softmax)) return out;
  const auto n = static_cast<double>(matrix.q.shape[2]);
  const auto dim = static_cast<double>(matrix.q.shape[3]);
  double s = inputs.target();
  std::optional<double> radius;
  if (s >= 0) radius = circular_radius(std::expm1(s), n);
  if (is_lln) {
    const double tq = std::pow(matrix.alpha * inputs.q.sigma, 2);
    const double tk = std::pow(matrix.beta * inputs.k.sigma, 2);
    const MatchingConstants line =
        options.constants.value_or(matching_constants(matrix.q.shape[3]));
    out.t = tq + tk;
    s = line.a * out.t + line.b;
    radius = circular_radius(std::expm1(tq) * std::expm1(tk), n * dim);
  }
  if (rows != nullptr && s >= 0) {
    out.entropy = {std::log(n) - s / 2, rows->entropy.mean};
    out.variance = {std::expm1(s) / (n * n), rows->variance};
    if (rows->log) {
      out.log_mean = {-std::log(n) - s / 2, rows->log->mean};
      out.log_variance = {s, rows->log->variance};
    }
  }
  if (is_lln && rows != nullptr && rows->log) {
    out.fenton_wilkinson = {std::log1p(std::expm1(out.t) / dim), rows->log->unnormalised_variance};
  }
  if (radius && spectrum != nullptr) out.lambda_2 = {*radius, spectrum->lambda_2};
  return out;
}

Verdict judge(double entropy, double lambda_2, std::int64_t tokens) noexcept {
  const auto n = static_cast<double>(tokens);
  const double deficit = std::log(n) - entropy;
  if (deficit < std::numbers::ln2) return Verdict::diffuse;
  const double radius = circular_radius(std::expm1(2 * deficit), n);
  return lambda_2 >= kShareOfRadius * radius ? Verdict::unbiased : Verdict::biased;
}

}  // namespace lln::analysis
