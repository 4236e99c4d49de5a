// Scalar truths of moment matching: the mergeable triple of count, mean and squared deviations,
// running moments, and the fitted constants.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <array>
#include <cmath>

#include "lln/moments.h"
#include "math/host_device.h"

namespace lln {

// From sums of x - pivot and of its square. Nothing cancels when the pivot is one of the numbers.
LLN_HOST_DEVICE inline Moments moments_from_sums(double count, double pivot, double sum,
                                                 double squares) noexcept {
  if (count == 0) return {};
  const double shift = sum / count;
  const double m2 = squares - sum * shift;
  return {count, pivot + shift, m2 < 0 ? 0 : m2};  // not max(): NaN stays
}

LLN_HOST_DEVICE inline Moments merged(const Moments& x, const Moments& y) noexcept {
  if (x.count == 0) return y;
  if (y.count == 0) return x;
  const double count = x.count + y.count;
  const double gap = y.mean - x.mean;
  const double share = y.count / count;
  return {count, x.mean + gap * share, x.m2 + y.m2 + gap * gap * x.count * share};
}

// Moments::variance() for kernels on a device.
LLN_HOST_DEVICE inline double variance_of(const Moments& m) noexcept {
  return m.count > 1 ? m.m2 / (m.count - 1) : 0;
}

// Takes the moments of one step into running ones; a step without numbers changes nothing.
LLN_HOST_DEVICE inline void take_step(RunningMoments::Head& head, double decay,
                                      const Moments& step) noexcept {
  if (step.count == 0) return;
  head.weight = decay * head.weight + (1 - decay);
  const double share = (1 - decay) / head.weight;  // 1 at the first step: no start value to forget
  head.mean += share * (step.mean - head.mean);
  head.variance += share * (variance_of(step) - head.variance);
}

struct FittedConstants {
  std::int64_t dim;
  MatchingConstants constants;
};

// lln fit --dim 8 16 32 48 64 80 96 128 192 256 --tokens 512 --range 0.75 3 --samples 1024 --seed 1
inline constexpr std::array<FittedConstants, 10> kFitted = {{
    {8, {0.2574, -0.3402}},
    {16, {0.2145, -0.3745}},
    {32, {0.1779, -0.3738}},
    {48, {0.1584, -0.3605}},
    {64, {0.1474, -0.3572}},
    {80, {0.1384, -0.3481}},
    {96, {0.1315, -0.3409}},
    {128, {0.1217, -0.3293}},
    {192, {0.1088, -0.3106}},
    {256, {0.1002, -0.2964}},
}};

inline MatchingConstants fitted_constants(std::int64_t dim) noexcept {
  if (dim <= kFitted.front().dim) return kFitted.front().constants;
  if (dim >= kFitted.back().dim) return kFitted.back().constants;
  const auto* high = std::find_if(kFitted.begin(), kFitted.end(),
                                  [&](const FittedConstants& f) { return f.dim >= dim; });
  const auto* low = high - 1;
  const double part = std::log(static_cast<double>(dim) / static_cast<double>(low->dim)) /
                      std::log(static_cast<double>(high->dim) / static_cast<double>(low->dim));
  return {std::lerp(low->constants.a, high->constants.a, part),
          std::lerp(low->constants.b, high->constants.b, part)};
}

}  // namespace lln
