// What one step of training costs: its time, and the most memory that it takes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>

#include "lln_torch/train/run_model.h"

namespace lln_torch {

struct StepCost {
  double seconds = 0;  // median over rounds of the mean of a round
  double fastest_seconds = 0;
  std::int64_t steps = 0;  // that were timed
  double tokens = 0;       // of a step that count; 0 where rows are images
  // Peak, with weights, gradients and the optimiser's averages, where the system tells it.
  std::optional<std::int64_t> memory_bytes;
};

// Trains the model on the first batch of its source, again and again, for at least `seconds`.
StepCost measure_step_cost(const RunModel& made, const torch::Device& device, double seconds);

}  // namespace lln_torch
