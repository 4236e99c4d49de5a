// Steps are timed in rounds, the device waited for at the end of each, as in a training that looks
// at its loss every few steps.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/step_cost.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <vector>

#include "lln/error.h"
#include "lln_torch/train/peak_memory.h"
#include "lln_torch/train/prefetch.h"
#include "lln_torch/train/train_step.h"

namespace lln_torch {
namespace {

using StepClock = std::chrono::steady_clock;

// Steps before those that are timed: a graph is captured by the fourth (cuda_graph.cc).
constexpr int kUntimedSteps = 4;
constexpr std::size_t kRounds = 3;
constexpr double kRate = 0;  // the same work, and values that stay as they were drawn

class Rounds {
 public:
  Rounds(const RunModel& made, const torch::Device& device)
      : optimizer_(*made.model, made.settings.optimizer),
        step_(*made.model, optimizer_, made.settings.step, device),
        parts_(batch_parts(*made.source, 0, made.settings.batch, made.settings.accumulate)) {}

  double seconds_of(std::int64_t steps) {
    const StepClock::time_point start = StepClock::now();
    for (std::int64_t i = 0; i < steps; ++i) step_.run(parts_, number_++, kRate);
    const StepSums sums = step_.take();
    const double seconds = std::chrono::duration<double>(StepClock::now() - start).count();
    if (sums.bad_step) {
      throw lln::Error(lln::ErrorCode::internal,
                       fmt::format("the loss of the step is {}, the norm of its gradient {}",
                                   sums.bad_loss, sums.bad_gradient_norm));
    }
    return seconds;
  }
  double tokens() const {
    double sum = 0;
    for (const Batch& part : parts_) sum += tokens_in(part);
    return sum;
  }

 private:
  AdamW optimizer_;
  TrainStep step_;
  std::vector<Batch> parts_;
  std::int64_t number_ = 0;
};

StepCost time_rounds(Rounds& rounds, double seconds) {
  rounds.seconds_of(kUntimedSteps);
  const double once = rounds.seconds_of(1);
  const double wanted = std::ceil(seconds / static_cast<double>(kRounds) / once);
  const auto steps = static_cast<std::int64_t>(std::clamp(wanted, 1.0, 1e6));
  std::vector<double> times;
  for (std::size_t i = 0; i < kRounds; ++i) {
    times.push_back(rounds.seconds_of(steps) / static_cast<double>(steps));
  }
  std::sort(times.begin(), times.end());
  StepCost cost;
  cost.seconds = times[kRounds / 2];
  cost.fastest_seconds = times.front();
  cost.steps = steps * static_cast<std::int64_t>(kRounds);
  cost.tokens = rounds.tokens();
  return cost;
}

}  // namespace

StepCost measure_step_cost(const RunModel& made, const torch::Device& device, double seconds) {
  made.model->train();
  const bool known = reset_peak_memory(device);
  Rounds rounds(made, device);
  StepCost cost = time_rounds(rounds, seconds);
  if (known) cost.memory_bytes = peak_memory(device);
  return cost;
}

}  // namespace lln_torch
