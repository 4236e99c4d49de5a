// The rule of a mode: a line, or the slice of a table at the head's dim.
// SPDX-License-Identifier: Apache-2.0
#include "api/matching_rule.h"

#include <cmath>

#include "math/matching_table.h"
#include "math/moments.h"

namespace lln {
namespace {

// Between two dims linear in logarithms, as over tokens and targets.
MatchingRule slice(const MatchingTable& table, std::int64_t dim) {
  const TablePlace place =
      table_place(std::log2(static_cast<double>(dim) / kTableFirstDim), kTableDims);
  const auto low = static_cast<std::size_t>(place.low);
  MatchingRule rule{.by_table = true, .dim_clamped = place.clamped};
  for (std::size_t n = 0; n < kTableTokens; ++n) {
    for (std::size_t t = 0; t < kTableTargets; ++t) {
      const double below = std::log(table[low][n][t]), above = std::log(table[low + 1][n][t]);
      rule.log_share[n][t] = static_cast<float>(std::lerp(below, above, place.part));
    }
  }
  return rule;
}

}  // namespace

MatchingRule matching_rule(const MatchingOptions& options, std::int64_t dim) {
  switch (options.mode) {
    case Matching::none:
    case Matching::frozen:
      return {};
    case Matching::paper:
      return {.line = kAuthorsConstants};
    case Matching::per_head:
    case Matching::ema:
      return {.line = options.constants.value_or(fitted_constants(dim))};
    case Matching::exact:
      return slice(kExactTable, dim);
    case Matching::entropy:
      return slice(kEntropyTable, dim);
  }
  return {};
}

}  // namespace lln
