// Calibration of a layer. The file that keeps it is in src/io.
// SPDX-License-Identifier: Apache-2.0
#include "lln/calibration.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "api/faults.h"
#include "api/head_sums.h"
#include "api/matching_rule.h"
#include "api/memory_errors.h"
#include "lln/error.h"
#include "math/moments.h"

namespace lln {
namespace {

PooledMoments pool(const HeadPairs& pairs, const Problem& p) {
  const auto heads_k = static_cast<std::size_t>(p.heads_k);
  PooledMoments pooled{.heads = p.heads, .dim = p.dim};
  pooled.q.resize(heads_k);
  pooled.k.resize(heads_k);
  for (std::size_t i = 0; i < pairs.k.size(); ++i) {
    const std::size_t head = i % heads_k;
    pooled.q[head] = merged(pooled.q[head], pairs.q[i]);
    pooled.k[head] = merged(pooled.k[head], pairs.k[i]);
    if (head == 0 && pairs.k[i].count > 0)
      ++pooled.sequences;  // the same tokens count in all heads
  }
  return pooled;
}

bool usable(const Moments& m) {
  return m.count > 0 && std::isfinite(m.count) && std::isfinite(m.mean) && m.m2 >= 0 &&
         std::isfinite(m.m2);
}

void check_pooled(const PooledMoments& pooled, Matching mode) {
  Faults faults;
  const auto heads_k = static_cast<std::int64_t>(pooled.k.size());
  if (!reads_sequence(mode)) {
    faults.add(fmt::format("mode {} finds no scales: expected paper, per_head, exact or entropy",
                           to_string(mode)));
  }
  if (heads_k == 0 || pooled.q.size() != pooled.k.size()) {
    faults.add(fmt::format("{} moments of q and {} of k: expected one of each per key head",
                           pooled.q.size(), heads_k));
  } else if (pooled.heads < 1 || pooled.heads % heads_k != 0) {
    faults.add(fmt::format("heads is {}: expected a positive multiple of the {} key heads",
                           pooled.heads, heads_k));
  }
  if (pooled.dim < 1 || pooled.sequences < 1) {
    faults.add(fmt::format("dim is {}, sequences is {}: expected both positive", pooled.dim,
                           pooled.sequences));
  }
  for (const auto& [side, heads] : {std::pair("q", &pooled.q), std::pair("k", &pooled.k)}) {
    const auto bad = std::find_if_not(heads->begin(), heads->end(), usable);
    if (bad == heads->end()) continue;
    faults.add(fmt::format(
        "{} of key head {} has count {}, mean {}, m2 {}: expected finite moments of some numbers",
        side, bad - heads->begin(), bad->count, bad->mean, bad->m2));
  }
  faults.throw_any("calibrate", "pooled moments");
}

Moments merged_heads(const std::vector<Moments>& heads) {
  return std::accumulate(heads.begin(), heads.end(), Moments{}, merged);
}

CalibratedLayer scales_of(const PooledMoments& pooled, Matching mode,
                          std::vector<ClampedHead>* clamped) {
  const MatchingRule rule = matching_rule({.mode = mode}, pooled.dim);
  const bool all_heads = mode == Matching::paper;
  const std::size_t heads_k = pooled.k.size();
  CalibratedLayer layer{
      .dim = pooled.dim,
      .tokens = pooled.k[0].count / static_cast<double>(pooled.dim * pooled.sequences)};
  const Moments all_q = merged_heads(pooled.q), all_k = merged_heads(pooled.k);
  for (std::size_t h = 0; h < heads_k; ++h) {
    const MatchedScales scales =
        matched_scales((all_heads ? all_q : pooled.q[h]).variance(),
                       (all_heads ? all_k : pooled.k[h]).variance(), layer.tokens, rule);
    layer.alpha.insert(layer.alpha.end(), static_cast<std::size_t>(pooled.heads) / heads_k,
                       static_cast<float>(scales.alpha));
    layer.beta.push_back(static_cast<float>(scales.beta));
    if (clamped != nullptr && scales.clamped()) {
      clamped->push_back(clamped_head(-1, all_heads ? -1 : static_cast<std::int64_t>(h), scales));
    }
  }
  return layer;
}

CalibratedLayer calibrated(const MatchingInputs& in, Matching mode,
                           std::vector<ClampedHead>* clamped, const Exec& exec) {
  const CheckedMatching checked = check_calibration(in, mode);
  const PooledMoments pooled = pool(sum_pairs("calibrate", in, checked, exec), checked.problem);
  const auto empty = [](const Moments& m) { return m.count == 0; };
  if (std::any_of(pooled.q.begin(), pooled.q.end(), empty) || pooled.sequences == 0) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("calibrate: no token of {} counts: there is nothing to match",
                            to_string(checked.problem)));
  }
  return scales_of(pooled, mode, clamped);
}

}  // namespace

const CalibratedLayer& Calibration::layer(std::string_view name) const {
  const auto it = std::find_if(layers.begin(), layers.end(),
                               [&](const CalibratedLayer& layer) { return layer.name == name; });
  if (it != layers.end()) return *it;
  std::vector<std::string> names;
  for (const CalibratedLayer& layer : layers) names.push_back(fmt::format("'{}'", layer.name));
  throw Error(ErrorCode::invalid_argument,
              fmt::format("the calibration has no layer '{}': found {}", name,
                          names.empty() ? "none" : fmt::format("{}", fmt::join(names, ", "))));
}

CalibratedLayer calibrate(const MatchingInputs& in, Matching mode,
                          std::vector<ClampedHead>* clamped, const Exec& exec) {
  return memory_errors("calibrate", [&] { return calibrated(in, mode, clamped, exec); });
}

CalibratedLayer calibrate(const PooledMoments& pooled, Matching mode,
                          std::vector<ClampedHead>* clamped) {
  check_pooled(pooled, mode);
  return memory_errors("calibrate", [&] { return scales_of(pooled, mode, clamped); });
}

}  // namespace lln
