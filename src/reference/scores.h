// What the forward and the backward of the reference share: which keys a row sees, and the two
// scores whose softmax over those keys gives the weights of LLN and of softmax attention. Both are
// kept as logarithms, and neither goes through the factorisation that the fast kernels rest on.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "api/kernel.h"
#include "math/feature_map.h"
#include "reference/rows.h"

namespace lln::reference {

inline constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// The valid keys that row i of a sequence sees; block 0 means no blocks. `everywhere` are keys that
// all rows see besides.
class Visible {
 public:
  Visible(const Sequence& sequence, bool causal, std::int64_t block,
          std::vector<std::int64_t> everywhere = {})
      : sequence_(sequence), causal_(causal), block_(block), everywhere_(std::move(everywhere)) {}

  void keys(std::int64_t row, std::vector<std::int64_t>& out) const {
    std::int64_t first = sequence_.key_first;
    std::int64_t end = causal_ ? std::min(sequence_.key_end, row + 1) : sequence_.key_end;
    out = everywhere_;
    if (block_ > 0) {
      const std::int64_t origin = sequence_.block_origin;
      if (row < origin) return;  // in no block
      const std::int64_t begin = origin + (row - origin) / block_ * block_;
      first = std::max(first, begin);
      end = std::min(end, begin + block_);
    }
    for (std::int64_t key = first; key < end; ++key) {
      if (sequence_.valid(key)) out.push_back(key);
    }
  }

 private:
  const Sequence& sequence_;
  bool causal_;
  std::int64_t block_;
  std::vector<std::int64_t> everywhere_;
};

// f(scale x) and f'(scale x) of every element.
struct Exponents {
  Rows value;
  Rows derivative;

  Exponents(const Rows& x, double scale, Feature feature, double power)
      : value(x.count, x.width), derivative(x.count, x.width) {
    for (std::size_t i = 0; i < x.data.size(); ++i) {
      const LogFeature<double> f = log_feature(feature, power, clamp_exponent(scale * x.data[i]));
      value.data[i] = clamp_exponent(f.value);
      derivative.data[i] = f.derivative;
    }
  }
};

// ln A_ij = logsumexp_l (f(alpha q_il) + f(beta k_jl)).
class LlnScores {
 public:
  LlnScores(const Exponents& a, const Exponents& u) : a_(a), u_(u) {}

  double score(std::int64_t i, std::int64_t j) const {
    const std::int64_t dim = a_.value.width;
    const double* a = a_.value[i];
    const double* u = u_.value[j];
    double largest = kMinusInfinity;
    for (std::int64_t l = 0; l < dim; ++l) largest = std::max(largest, a[l] + u[l]);
    double sum = 0;  // a NaN is not in the maximum but always in the sum
    for (std::int64_t l = 0; l < dim; ++l) sum += std::exp(a[l] + u[l] - largest);
    return largest + std::log(sum);
  }

  // Adds ds * d score(i, j) to the gradients of f(alpha q) and of f(beta k).
  void add_gradient(std::int64_t i, std::int64_t j, double score, double ds, Rows& da,
                    Rows& du) const {
    const double* a = a_.value[i];
    const double* u = u_.value[j];
    for (std::int64_t l = 0; l < a_.value.width; ++l) {
      const double share = ds * std::exp(a[l] + u[l] - score);
      da[i][l] += share;
      du[j][l] += share;
    }
  }

 private:
  const Exponents& a_;
  const Exponents& u_;
};

// q_i . k_j / sqrt(dim).
class DotScores {
 public:
  DotScores(const Rows& q, const Rows& k)
      : q_(q), k_(k), scale_(1 / std::sqrt(static_cast<double>(q.width))) {}

  double score(std::int64_t i, std::int64_t j) const {
    double sum = 0;
    for (std::int64_t l = 0; l < q_.width; ++l) sum += q_[i][l] * k_[j][l];
    return clamp_exponent(scale_ * sum);
  }

  void add_gradient(std::int64_t i, std::int64_t j, double, double ds, Rows& dq, Rows& dk) const {
    for (std::int64_t l = 0; l < q_.width; ++l) {
      dq[i][l] += ds * scale_ * k_[j][l];
      dk[j][l] += ds * scale_ * q_[i][l];
    }
  }

 private:
  const Rows& q_;
  const Rows& k_;
  double scale_;
};

// The weights of one row over the keys that it sees.
struct WeightedRow {
  std::vector<std::int64_t> keys;
  std::vector<double> scores;
  std::vector<double> weights;  // sum to one

  template <class Scores>
  void fill(const Scores& score, const Visible& visible, std::int64_t row) {
    visible.keys(row, keys);
    scores.clear();
    weights.clear();
    double largest = kMinusInfinity;
    for (const std::int64_t key : keys) {
      scores.push_back(score.score(row, key));
      largest = std::max(largest, scores.back());
    }
    double sum = 0;
    for (const double s : scores) {
      weights.push_back(std::exp(s - largest));
      sum += weights.back();
    }
    for (double& w : weights) w /= sum;
  }
};

// o_i = sum_j P_ij v_j for all rows.
template <class Scores>
Rows weighted_values(const Scores& scores, const Visible& visible, std::int64_t rows,
                     const Rows& v) {
  Rows o(rows, v.width);
  WeightedRow row;
  for (std::int64_t i = 0; i < rows; ++i) {
    row.fill(scores, visible, i);
    for (std::size_t x = 0; x < row.keys.size(); ++x) {
      const double* values = v[row.keys[x]];
      for (std::int64_t c = 0; c < v.width; ++c) o[i][c] += row.weights[x] * values[c];
    }
  }
  return o;
}

// Weights of the two parts of LLN+Diag at one place; 1 for a part alone.
struct PartWeights {
  double lln = 1;
  double diag = 1;
};

inline PartWeights part_weights(const Call& call, std::int64_t b, std::int64_t h, std::int64_t n,
                                std::int64_t c) {
  if (call.problem.kind != Kind::lln_diag) return {};
  if (call.in.lln_weight.given()) {
    return {element(call.in.lln_weight, b, h, n, c), element(call.in.diag_weight, b, h, n, c)};
  }
  const double mix =
      call.in.mix.given() ? element(call.in.mix, b, h, n, c) : double{call.options.mix};
  return {mix, 1 - mix};
}

}  // namespace lln::reference
