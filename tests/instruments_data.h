// Gaussian heads for the tests of the instruments, and attention matrices weight by weight from
// their definitions.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "lln/instruments.h"
#include "math/feature_map.h"
#include "math/random.h"

namespace lln::test {

struct GaussianHead {
  GaussianHead(std::int64_t tokens, std::int64_t dim, double sigma, std::uint64_t seed = 0)
      : n(tokens), d(dim) {
    for (std::int64_t i = 0; i < n * d; ++i) {
      const auto index = static_cast<std::uint64_t>(i);
      q.push_back(static_cast<float>(sigma * normal_number(2 * seed + 1, index)));
      k.push_back(static_cast<float>(sigma * normal_number(2 * seed + 2, index)));
    }
  }
  AttentionMatrix matrix(std::string_view kind) const {
    AttentionMatrix m;
    parse_matrix(kind, m);
    m.q = view(static_cast<const float*>(q.data()), {1, 1, n, d});
    m.k = view(static_cast<const float*>(k.data()), {1, 1, n, d});
    return m;
  }
  // With the authors' alpha and beta.
  AttentionMatrix matched(std::string_view kind) const {
    AttentionMatrix m = matrix(kind);
    float alpha = 0, beta = 0;
    match_moments({.q = m.q, .k = m.k}, {view(&alpha, {1, 1, 1, 1}), view(&beta, {1, 1, 1, 1})},
                  {.mode = Matching::paper});
    m.alpha = alpha;
    m.beta = beta;
    return m;
  }

  std::int64_t n, d;
  std::vector<float> q, k;
};

// ln of the weight of key j for query i before rows are normalised; -inf where there is none. Of
// softmax, lln, diag and quadratic.
inline double log_weight(const GaussianHead& x, const AttentionMatrix& m, std::int64_t i,
                         std::int64_t j) {
  const double none = -std::numeric_limits<double>::infinity();
  if (m.causal && j > i) return none;
  if (m.kind == MatrixKind::diag && i / m.diag_block != j / m.diag_block) return none;
  double dot = 0, top = none, sum = 0;
  std::vector<double> exponents;
  for (std::int64_t l = 0; l < x.d; ++l) {
    const double q = x.q[static_cast<std::size_t>(i * x.d + l)];
    const double k = x.k[static_cast<std::size_t>(j * x.d + l)];
    dot += q * k;
    exponents.push_back(log_feature(m.feature, m.power, m.alpha * q).value +
                        log_feature(m.feature, m.power, m.beta * k).value);
    top = std::max(top, exponents.back());
  }
  if (m.kind == MatrixKind::quadratic) return 2 * std::log(std::abs(dot));
  if (m.kind != MatrixKind::lln) return dot / std::sqrt(static_cast<double>(x.d));
  for (const double e : exponents) sum += std::exp(e - top);
  return top + std::log(sum);
}

// P [n, n] from the definition of its kind.
inline std::vector<double> plain_matrix(const GaussianHead& x, const AttentionMatrix& m) {
  std::vector<double> p(static_cast<std::size_t>(x.n * x.n));
  if (m.kind == MatrixKind::lln_diag) {
    AttentionMatrix lln = m, diag = m;
    lln.kind = MatrixKind::lln;
    diag.kind = MatrixKind::diag;
    const std::vector<double> first = plain_matrix(x, lln), second = plain_matrix(x, diag);
    for (std::size_t i = 0; i < p.size(); ++i) p[i] = m.mix * first[i] + (1 - m.mix) * second[i];
    return p;
  }
  for (std::int64_t i = 0; i < x.n; ++i) {
    double* const row = p.data() + i * x.n;
    double top = -std::numeric_limits<double>::infinity(), sum = 0;
    for (std::int64_t j = 0; j < x.n; ++j) top = std::max(top, row[j] = log_weight(x, m, i, j));
    for (std::int64_t j = 0; j < x.n; ++j) sum += row[j] = std::exp(row[j] - top);
    for (std::int64_t j = 0; j < x.n; ++j) row[j] /= sum;
  }
  return p;
}

// P [n, n] as the library makes it.
inline std::vector<double> all_rows(const AttentionMatrix& m, const Exec& exec = {}) {
  const std::int64_t n = m.kind == MatrixKind::given ? m.p.shape[2] : m.q.shape[2];
  std::vector<double> p(static_cast<std::size_t>(n * n));
  matrix_rows(m, 0, n, p, exec);
  return p;
}

}  // namespace lln::test
