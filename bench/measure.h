// Samples of one problem, taken in turn with samples of the machine's peak: what slows the machine
// for a while slows both, and the ratio of a sample to its neighbouring peak stays.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "bench/problem_data.h"
#include "lln/problem.h"

namespace lln::bench {

struct Result {
  std::string problem;  // as to_string prints it
  std::string kernel;
  int threads = 0;  // of the CPU; 0 on a device
  double median_ms = 0, p10_ms = 0, p90_ms = 0;
  double first_ms = 0;  // on a device: the first call, from the host's side and until it was done
  Cost cost;
  // max(bytes / bandwidth, FLOPs / peak); on a device, whose arithmetic is no limit, bytes /
  // bandwidth. The ratio is the median over all samples of time over the floor by the peak or the
  // bandwidth measured next to the sample; floor_ms is median_ms / ratio.
  double floor_ms = 0;
  double ratio = 0;
  std::size_t workspace_bytes = 0;
  Manner manner;
  std::vector<double> peaks;       // operations per second, in the order of measurement
  std::vector<double> bandwidths;  // of a device, bytes per second, in the order of measurement
};

// Throws lln::Error where the problem cannot be measured: no kernel, nothing to compute, or nothing
// to match.
void check_measurable(const Problem& problem, Parallel& threads, const Manner& manner = {});

// Percentiles and ratio of a result from its samples in seconds.
void summarise(const std::vector<double>& times, const std::vector<double>& ratios, Result& result);

// Of a problem on the CPU. Takes about this many seconds, more where three calls take longer.
// `bandwidth` in bytes/second.
Result measure(const Problem& problem, Parallel& threads, double seconds, double bandwidth,
               const Manner& manner = {});

}  // namespace lln::bench
