// The learning rate as a function of the step. No torch: it is one number.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace lln_torch {

struct Schedule {
  // constant, linear, cosine or one_cycle: what becomes of the rate after the warmup.
  std::string shape = "linear";
  double peak = 1e-3;
  std::int64_t warmup = 0;  // steps of the rise, part of `steps`
  std::int64_t steps = 1;
  double final_share = 0;  // of the peak, at the end of linear and cosine
};

const std::vector<std::string>& schedule_shapes();

// The rate of update `step` of 0 .. steps - 1. The warmup of constant, linear and cosine is a
// straight line that reaches the peak with its last step; after it linear and cosine fall, and
// would reach final_share with step `steps`. one_cycle rises from peak / 25 to the peak along half
// a cosine, and falls along another to peak / 250000.
double learning_rate(const Schedule& schedule, std::int64_t step);

}  // namespace lln_torch
