// The order of samples: peak, a batch of calls, peak, a batch of calls, ..., peak. Each batch is
// held against the two peaks around it.
// SPDX-License-Identifier: Apache-2.0
#include "bench/measure.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "bench/machine.h"
#include "bench/percentile.h"
#include "bench/problem_data.h"
#include "lln/error.h"

namespace lln::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr double kBatchSeconds = 0.02;  // calls between two peaks, at least one
constexpr double kWarmSeconds = 0.05;   // at least one call
constexpr double kMostPeakSeconds = 0.2;
constexpr int kLeastBatches = 3;
constexpr double kPatience = 5;  // times the seconds asked for, also with fewer batches

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double timed_run(ProblemData& data) {
  const auto start = Clock::now();
  data.run();
  return seconds_since(start);
}

// The time of one call once caches and threads are warm.
double warm_up(ProblemData& data) {
  const auto start = Clock::now();
  double last = timed_run(data);
  while (seconds_since(start) < kWarmSeconds) last = timed_run(data);
  return last;
}

}  // namespace

void check_measurable(const Problem& problem, Parallel& threads, const Manner& manner) {
  workspace_bytes(
      problem, {.parallel = &threads, .kernel = manner.kernel});  // throws where no kernel takes it
  const Cost cost = minimal_cost(problem);
  if (!(cost.bytes > 0 && cost.flops > 0)) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}: nothing to measure: at least {} bytes and {} floating-point "
                            "operations",
                            to_string(problem), cost.bytes, cost.flops));
  }
  const bool passes = problem.op == Op::forward || problem.op == Op::train;
  if (manner.matched &&
      (!passes || !problem.has_lln() || problem.causal || problem.feature != Feature::exp)) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}: alpha and beta are matched in a bidirectional forward of LLN with "
                            "exp features alone",
                            to_string(problem)));
  }
  if (manner.parameters &&
      ((problem.op != Op::backward && problem.op != Op::train) || !problem.has_lln())) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}: gradients of alpha, beta and mix are those of backward and train "
                            "of LLN and LLN+Diag",
                            to_string(problem)));
  }
}

Result measure(const Problem& problem, Parallel& threads, double seconds, double bandwidth,
               const Manner& manner) {
  check_measurable(problem, threads, manner);
  Exec exec{.parallel = &threads, .kernel = manner.kernel};
  Result result;
  result.problem = to_string(problem);
  result.kernel = explain(problem, exec).chosen;
  result.threads = threads.workers();
  result.cost = minimal_cost(problem);
  result.manner = manner;

  HostMemory memory(threads);
  result.workspace_bytes = workspace_bytes(problem, exec);
  exec.workspace = memory.zeros(result.workspace_bytes);
  ProblemData data(problem, memory, exec, manner);
  const double call_seconds = warm_up(data);
  // As long as a batch: on a busy machine both then lose as many time slices to others.
  const double peak_seconds = std::clamp(call_seconds, kBatchSeconds, kMostPeakSeconds);

  std::vector<double> times, ratios;
  const auto start = Clock::now();
  result.peaks.push_back(product_peak(threads, peak_seconds, problem.dtype));
  for (int batch = 0; batch < kLeastBatches || seconds_since(start) < seconds; ++batch) {
    if (batch > 0 && seconds_since(start) > kPatience * seconds) break;
    const std::size_t first = times.size();
    const auto batch_start = Clock::now();
    do {
      times.push_back(timed_run(data));
    } while (seconds_since(batch_start) < kBatchSeconds);
    const double before = result.peaks.back();
    result.peaks.push_back(product_peak(threads, peak_seconds, problem.dtype));
    const double peak = 2 / (1 / before + 1 / result.peaks.back());  // the mean of their times
    const double floor = std::max(result.cost.bytes / bandwidth, result.cost.flops / peak);
    for (std::size_t i = first; i < times.size(); ++i) ratios.push_back(times[i] / floor);
  }
  summarise(times, ratios, result);
  return result;
}

void summarise(const std::vector<double>& times, const std::vector<double>& ratios,
               Result& result) {
  result.median_ms = 1e3 * percentile(times, 50);
  result.p10_ms = 1e3 * percentile(times, 10);
  result.p90_ms = 1e3 * percentile(times, 90);
  result.ratio = percentile(ratios, 50);
  result.floor_ms = result.median_ms / result.ratio;
}

}  // namespace lln::bench
