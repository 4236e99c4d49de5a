// Steps are timed in rounds, the device waited for at the end of each, as in a training that looks
// at its loss every few steps.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/step_cost.h"

#include <c10/util/Exception.h>

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
    step_.take();
    return std::chrono::duration<double>(StepClock::now() - start).count();
  }

 private:
  Optimizer optimizer_;
  TrainStep step_;
  std::vector<Batch> parts_;
  std::int64_t number_ = 0;
};

StepCost time_rounds(Rounds& rounds, double seconds) {
  rounds.seconds_of(kUntimedSteps);
  const double once = rounds.seconds_of(1);
  StepCost cost{.seconds = once, .fastest_seconds = once, .steps = 1};
  if (once >= seconds) return cost;
  const double wanted = std::ceil(seconds / static_cast<double>(kRounds) / once);
  const auto steps = static_cast<std::int64_t>(std::min(wanted, 1e6));
  std::vector<double> times;
  for (std::size_t i = 0; i < kRounds; ++i) {
    times.push_back(rounds.seconds_of(steps) / static_cast<double>(steps));
  }
  std::sort(times.begin(), times.end());
  cost.seconds = times[kRounds / 2];
  cost.fastest_seconds = times.front();
  cost.steps = steps * static_cast<std::int64_t>(kRounds);
  return cost;
}

}  // namespace

StepCost measure_step_cost(const RunModel& made, const torch::Device& device, double seconds) {
  made.model->train();
  reset_peak_memory(device);
  StepCost cost;
  try {
    Rounds rounds(made, device);
    cost = time_rounds(rounds, seconds);
    cost.memory_bytes = peak_memory(device);
  } catch (const c10::OutOfMemoryError&) {
    cost.failure = "out of memory";
  } catch (const c10::Error& e) {
    cost.failure = e.what_without_backtrace();
  } catch (const lln::Error& e) {
    const bool memory = e.code() == lln::ErrorCode::out_of_memory;
    if (!memory && e.code() != lln::ErrorCode::unsupported) throw;
    cost.failure = memory ? "out of memory" : e.what();
  }
  return cost;
}

}  // namespace lln_torch
