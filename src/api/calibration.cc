// Calibration of a layer. The file that keeps it is in src/io.
// SPDX-License-Identifier: Apache-2.0
#include "lln/calibration.h"

#include <fmt/format.h>

#include <algorithm>

#include "api/head_sums.h"
#include "api/matching_rule.h"
#include "api/memory_errors.h"
#include "lln/error.h"
#include "math/moments.h"

namespace lln {
namespace {

// Both sides of one key head over all sequences, and how many of those have keys.
struct Pooled {
  Moments q, k;
  std::int64_t sequences = 0;
};

std::vector<Pooled> pool(const HeadPairs& pairs, std::size_t heads_k, bool all_heads) {
  std::vector<Pooled> pooled(all_heads ? 1 : heads_k);
  for (std::size_t i = 0; i < pairs.k.size(); ++i) {
    Pooled& head = pooled[all_heads ? 0 : i % heads_k];
    head.q = merged(head.q, pairs.q[i]);
    head.k = merged(head.k, pairs.k[i]);
    if (pairs.k[i].count > 0) ++head.sequences;
  }
  return pooled;
}

CalibratedLayer calibrated(const MatchingInputs& in, Matching mode,
                           std::vector<ClampedHead>* clamped, const Exec& exec) {
  const CheckedMatching checked = check_calibration(in, mode);
  const Problem& p = checked.problem;
  const MatchingRule rule = matching_rule({.mode = mode}, p.dim);
  const auto heads_k = static_cast<std::size_t>(p.heads_k);
  const bool all_heads = mode == Matching::paper;
  const std::vector<Pooled> pooled =
      pool(sum_pairs("calibrate", in, checked, exec), heads_k, all_heads);
  CalibratedLayer layer{.dim = p.dim};
  for (std::size_t h = 0; h < heads_k; ++h) {
    const Pooled& head = pooled[all_heads ? 0 : h];
    if (head.q.count == 0 || head.k.count == 0) {
      throw Error(
          ErrorCode::invalid_argument,
          fmt::format("calibrate: no token of {} counts: there is nothing to match", to_string(p)));
    }
    layer.tokens = head.k.count / static_cast<double>(p.dim) / static_cast<double>(head.sequences);
    const MatchedScales scales =
        matched_scales(head.q.variance(), head.k.variance(), layer.tokens, rule);
    layer.alpha.insert(layer.alpha.end(), static_cast<std::size_t>(p.heads / p.heads_k),
                       static_cast<float>(scales.alpha));
    layer.beta.push_back(static_cast<float>(scales.beta));
    if (clamped != nullptr && scales.clamped()) {
      clamped->push_back(clamped_head(-1, all_heads ? -1 : static_cast<std::int64_t>(h), scales));
    }
  }
  return layer;
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

}  // namespace lln
