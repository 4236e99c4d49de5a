// From two variances to alpha and beta: the scale st = alpha sigma_q = beta sigma_k by the fitted
// line of Var(ln P), or by a table over the number of keys and the target (docs/matching.md). A
// rule is a plain value of a kilobyte, so that kernels on a device get it as an argument.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>

#include "lln/moments.h"
#include "math/host_device.h"

namespace lln {

// A standard deviation or a scaled one below this counts as this.
inline constexpr double kLeastSigma = 1e-4;

// Sizes of the tables: dims 8, 16 to 256, tokens 16, 64 to 65536, and targets sigma_q^2 sigma_k^2
// from 1/64 to 16, three to an octave.
inline constexpr int kTableDims = 6, kTableTokens = 7, kTableTargets = 31;
inline constexpr double kTableFirstDim = 8, kTableFirstTokens = 16, kTableFirstTarget = 0.015625;

struct MatchingRule {
  MatchingConstants line = {};
  bool by_table = false;  // instead of the line
  bool dim_clamped = false;
  float log_share[kTableTokens][kTableTargets] = {};  // ln st for this dim
};

// A place on an axis of a table: between node `low` and the next. What is outside counts as the
// nearest end.
struct TablePlace {
  int low = 0;
  double part = 0;
  bool clamped = false;
};

LLN_HOST_DEVICE inline TablePlace table_place(double position, int nodes) noexcept {
  if (!(position >= 0)) return {0, 0, true};
  if (position > nodes - 1) return {nodes - 2, 1, true};
  const int low = position < nodes - 2 ? static_cast<int>(position) : nodes - 2;
  return {low, position - low, false};
}

struct MatchingShare {
  double st = 0;
  bool target_clamped = false;
  bool size_clamped = false;
};

LLN_HOST_DEVICE inline MatchingShare share_by_line(const MatchingConstants& line,
                                                   double target) noexcept {
  const double under_root = (target - line.b) / (2 * line.a);
  const bool reached = under_root >= kLeastSigma * kLeastSigma;
  return {reached ? std::sqrt(under_root) : kLeastSigma, !reached, false};
}

// Linear in the logarithms of tokens, target and st: st is a power of the target where it is small.
LLN_HOST_DEVICE inline MatchingShare share_by_table(const MatchingRule& rule, double target,
                                                    double tokens) noexcept {
  const TablePlace row = table_place(std::log2(tokens / kTableFirstTokens) / 2, kTableTokens);
  const TablePlace column = table_place(std::log2(target / kTableFirstTarget) * 3, kTableTargets);
  const auto along = [&](const float* shares) {
    return (1 - column.part) * static_cast<double>(shares[column.low]) +
           column.part * static_cast<double>(shares[column.low + 1]);
  };
  const double log_share = (1 - row.part) * along(rule.log_share[row.low]) +
                           row.part * along(rule.log_share[row.low + 1]);
  return {std::exp(log_share), column.clamped, row.clamped || rule.dim_clamped};
}

struct MatchedScales {
  double alpha = 1;
  double beta = 1;
  bool sigma_q_clamped = false;
  bool sigma_k_clamped = false;
  bool target_clamped = false;
  bool size_clamped = false;
  bool clamped() const noexcept {
    return sigma_q_clamped || sigma_k_clamped || target_clamped || size_clamped;
  }
};

inline ClampedHead clamped_head(std::int64_t sequence, std::int64_t head_k,
                                const MatchedScales& scales) noexcept {
  return {sequence,
          head_k,
          scales.sigma_q_clamped,
          scales.sigma_k_clamped,
          scales.target_clamped,
          scales.size_clamped};
}

// `tokens` is the number of keys that count; the line has no use for it.
LLN_HOST_DEVICE inline MatchedScales matched_scales(double variance_q, double variance_k,
                                                    double tokens,
                                                    const MatchingRule& rule) noexcept {
  const double sigma_q = std::sqrt(variance_q), sigma_k = std::sqrt(variance_k);
  const double q = sigma_q < kLeastSigma ? kLeastSigma : sigma_q;  // not max(): NaN stays
  const double k = sigma_k < kLeastSigma ? kLeastSigma : sigma_k;
  const double target = q * q * k * k;
  const MatchingShare share =
      rule.by_table ? share_by_table(rule, target, tokens) : share_by_line(rule.line, target);
  return {share.st / q,          share.st / k,         sigma_q < kLeastSigma,
          sigma_k < kLeastSigma, share.target_clamped, share.size_clamped};
}

}  // namespace lln
