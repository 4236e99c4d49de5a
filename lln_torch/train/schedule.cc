// Shapes of the learning rate.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace lln_torch {
namespace {

constexpr double kCycleStart = 1.0 / 25;  // of one_cycle, in shares of the peak
constexpr double kCycleEnd = kCycleStart / 1e4;

// From `from` at share 0 to `to` at share 1 along half a cosine.
double half_cosine(double from, double to, double share) {
  return to + (from - to) * 0.5 * (1 + std::cos(std::numbers::pi * share));
}

}  // namespace

const std::vector<std::string>& schedule_shapes() {
  static const std::vector<std::string> shapes = {"constant", "linear", "cosine", "one_cycle"};
  return shapes;
}

double learning_rate(const Schedule& schedule, std::int64_t step) {
  const bool cycle = schedule.shape == "one_cycle";
  if (step < schedule.warmup) {
    const auto warmup = static_cast<double>(schedule.warmup);
    const auto at = static_cast<double>(step);
    return schedule.peak * (cycle ? half_cosine(kCycleStart, 1, at / warmup) : (at + 1) / warmup);
  }
  if (schedule.shape == "constant") return schedule.peak;
  // The last step of one_cycle has its lowest rate; the others would reach theirs one step later,
  // because an update with rate 0 is none.
  const std::int64_t last = cycle ? schedule.steps - 1 : schedule.steps;
  const auto fall = static_cast<double>(std::max<std::int64_t>(1, last - schedule.warmup));
  const double share = std::min(1.0, static_cast<double>(step - schedule.warmup) / fall);
  if (cycle) return schedule.peak * half_cosine(1, kCycleEnd, share);
  if (schedule.shape == "cosine") {
    return schedule.peak * half_cosine(1, schedule.final_share, share);
  }
  return schedule.peak * (1 - (1 - schedule.final_share) * share);
}

}  // namespace lln_torch
