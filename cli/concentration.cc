// Rows of attention matrices by dense products, a few hundred rows at a time.
// SPDX-License-Identifier: Apache-2.0
#include "concentration.h"

#include <cmath>

#include "conformance/data.h"

namespace lln::cli {
namespace {

// From the rows of P. The variance over all entries is the mean variance inside rows plus the
// variance between the means of rows; both are unbiased for rows that are a sample.
Concentration measured(const Rows& p) {
  const auto keys = static_cast<double>(p.cols()), rows = static_cast<double>(p.rows());
  double inside = 0, sum = 0, squares = 0, entropy = 0;
  Eigen::ArrayXf logs(p.cols());
  for (Eigen::Index i = 0; i < p.rows(); ++i) {
    const auto row = p.row(i).array().transpose();
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

Concentration lln_concentration(const Rows& q, const Rows& k, double alpha, double beta) {
  const Eigen::RowVectorXf most = static_cast<float>(beta) * k.colwise().maxCoeff();
  Rows kn = ((static_cast<float>(beta) * k).rowwise() - most).array().exp().matrix();
  const Eigen::RowVectorXf sums = kn.colwise().sum();
  kn.array().rowwise() /= sums.array();
  const Eigen::RowVectorXf c = most.array() + sums.array().log();
  Rows w = (static_cast<float>(alpha) * q).rowwise() + c;
  w.colwise() -= Eigen::VectorXf(w.rowwise().maxCoeff());
  w = w.array().exp().matrix();
  w.array().colwise() /= Eigen::ArrayXf(w.array().rowwise().sum());
  return measured(w * kn.transpose());
}

SoftmaxScores::SoftmaxScores(const Rows& q, const Rows& k)
    : scores_(q * k.transpose() / std::sqrt(static_cast<float>(q.cols()))) {}

double SoftmaxScores::entropy(double scale) const {
  double total = 0;
  Eigen::ArrayXf scores(scores_.cols()), weights(scores_.cols());
  for (Eigen::Index i = 0; i < scores_.rows(); ++i) {
    scores = static_cast<float>(scale) * scores_.row(i).array().transpose();
    scores -= scores.maxCoeff();
    weights = scores.exp();
    const auto sum = static_cast<double>(weights.sum());
    total += std::log(sum) - static_cast<double>((weights * scores).sum()) / sum;
  }
  return total / static_cast<double>(scores_.rows());
}

Rows normal_rows(std::uint64_t stream, std::int64_t tokens, std::int64_t dim) {
  Rows rows(tokens, dim);
  for (Eigen::Index i = 0; i < rows.size(); ++i) {
    rows.data()[i] =
        static_cast<float>(conformance::normal_number(stream, static_cast<std::uint64_t>(i)));
  }
  return rows;
}

}  // namespace lln::cli
