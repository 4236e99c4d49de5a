// Rows of attention matrices by dense products. All loops run along tokens, where they are vectors.
// SPDX-License-Identifier: Apache-2.0
#include "concentration.h"

#include <cmath>
#include <numbers>
#include <random>

namespace lln::cli {
namespace {

// From rows of P as columns. The variance over all entries is the mean variance inside rows plus
// the variance between the means of rows; both are unbiased for rows that are a sample.
Concentration measured(const Eigen::MatrixXf& p) {
  const auto keys = static_cast<double>(p.rows()), rows = static_cast<double>(p.cols());
  double inside = 0, sum = 0, squares = 0, entropy = 0;
  Eigen::ArrayXf logs(p.rows());
  for (Eigen::Index i = 0; i < p.cols(); ++i) {
    const auto row = p.col(i).array();
    logs = row.log();
    entropy -= static_cast<double>((row * logs).sum());
    const double mean = static_cast<double>(logs.sum()) / keys;
    inside += static_cast<double>((logs - static_cast<float>(mean)).square().sum()) / keys;
    sum += mean;
    squares += mean * mean;
  }
  const double between = rows > 1 ? (squares - sum * sum / rows) / (rows - 1) : 0;
  return {inside / rows + between, entropy / rows};
}

}  // namespace

Concentration lln_concentration(const Tokens& q, const Tokens& k, double alpha, double beta) {
  Eigen::MatrixXf kn(k.rows(), k.cols()), w(q.cols(), q.rows());  // w: [channel, query]
  for (Eigen::Index l = 0; l < k.cols(); ++l) {
    const float most = k.col(l).maxCoeff();
    kn.col(l).array() = (static_cast<float>(beta) * (k.col(l).array() - most)).exp();
    const float sum = kn.col(l).sum();
    kn.col(l) /= sum;
    const float c = static_cast<float>(beta) * most + std::log(sum);
    w.row(l) = (static_cast<float>(alpha) * q.col(l).array() + c).transpose();
  }
  for (Eigen::Index i = 0; i < w.cols(); ++i) {
    w.col(i).array() = (w.col(i).array() - w.col(i).maxCoeff()).exp();
    w.col(i) /= w.col(i).sum();
  }
  return measured(kn * w);
}

SoftmaxScores::SoftmaxScores(const Tokens& q, const Tokens& k)
    : scores_(k * q.transpose() / std::sqrt(static_cast<float>(q.cols()))) {}

double SoftmaxScores::entropy(double scale) const {
  double total = 0;
  Eigen::ArrayXf scores(scores_.rows()), weights(scores_.rows());
  for (Eigen::Index i = 0; i < scores_.cols(); ++i) {
    scores = static_cast<float>(scale) * (scores_.col(i).array() - scores_.col(i).maxCoeff());
    weights = scores.exp();
    const auto sum = static_cast<double>(weights.sum());
    total += std::log(sum) - static_cast<double>((weights * scores).sum()) / sum;
  }
  return total / static_cast<double>(scores_.cols());
}

// Pairs by the method of Box and Muller. The engine's numbers are those of the standard; those of
// std::normal_distribution differ between libraries.
Tokens normal_tokens(std::uint64_t stream, std::int64_t tokens, std::int64_t dim) {
  std::mt19937_64 random(stream);
  const Eigen::Index size = tokens * dim, pairs = (size + 1) / 2;
  Eigen::ArrayXf radius(pairs), angle(pairs);
  for (Eigen::Index i = 0; i < pairs; ++i) {
    const std::uint64_t bits = random();
    radius[i] = (static_cast<float>(bits >> 40U) + 0.5F) * 0x1p-24F;
    angle[i] = static_cast<float>(bits & 0xFFFFFFU) * 0x1p-24F;
  }
  radius = (-2 * radius.log()).sqrt();
  angle *= 2 * std::numbers::pi_v<float>;
  Tokens numbers(tokens, dim);
  Eigen::Map<Eigen::ArrayXf> flat(numbers.data(), size);
  flat.head(pairs) = radius * angle.cos();
  flat.tail(size - pairs) = (radius * angle.sin()).head(size - pairs);
  return numbers;
}

}  // namespace lln::cli
