// Timing of the loops. Work is handed out in small tasks as the kernels do it: a thread that the
// system holds up costs the peak as much as it costs a kernel.
// SPDX-License-Identifier: Apache-2.0
#include "bench/machine.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <fstream>
#include <vector>

#include "bench/machine_loops.h"
#include "bench/percentile.h"
#include "io/bytes.h"

namespace lln::bench {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

constexpr std::int64_t kRoundsPerTask = 500;  // about 20 us: 48000 vector instructions
constexpr int kTasksPerRegion = 32;           // and thread: threads meet as rarely as in a kernel

using Chains = float (*)(std::int64_t rounds);

double seconds_of_chains(Parallel& threads, std::int64_t tasks, Chains chains) {
  struct Context {
    Chains chains;
    volatile float sink = 0;
  } context{chains};
  const auto start = Clock::now();
  threads.run(
      tasks,
      [](void* given, std::int64_t, int) {
        auto& own = *static_cast<Context*>(given);
        // Never negative, so nothing is written, but the compiler cannot know it.
        const float sum = own.chains(kRoundsPerTask);
        if (sum < 0) own.sink = sum;
      },
      &context);
  return seconds_since(start);
}

// Larger than the last cache of the machines that this library is used on.
constexpr std::int64_t kCopyFloats = std::int64_t{32} << 20;
constexpr std::int64_t kTaskFloats = std::int64_t{256} << 10;
constexpr std::size_t kLeastCopies = 3;

struct CopyArrays {
  float* from;
  float* to;
};

}  // namespace

std::string cpu_name() {
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line);) {
    if (!line.starts_with("model name")) continue;
    const std::size_t colon = line.find(':');
    const std::size_t begin = line.find_first_not_of(' ', colon + 1);
    if (colon != std::string::npos && begin != std::string::npos) return line.substr(begin);
  }
  return "unknown CPU";
}

double product_peak(Parallel& threads, double seconds, DType dtype) {
  const bool pairs = dtype == DType::bf16 && has_pairs();
  const std::int64_t flops = (pairs ? 2 : 1) * flops_per_round();
  const std::int64_t tasks = kTasksPerRegion * threads.workers();
  double done = 0, elapsed = 0;
  while (elapsed < seconds || done == 0) {
    elapsed += seconds_of_chains(threads, tasks, pairs ? pair_chains : fma_chains);
    done += static_cast<double>(tasks * kRoundsPerTask * flops);
  }
  return done / elapsed;
}

double copy_bandwidth(Parallel& threads, double seconds) {
  io::Bytes from(kCopyFloats * sizeof(float)), to(kCopyFloats * sizeof(float));
  CopyArrays arrays{reinterpret_cast<float*>(from.data()), reinterpret_cast<float*>(to.data())};
  // First touch by the threads: pages lie near them.
  threads.run(
      kCopyFloats / kTaskFloats,
      [](void* context, std::int64_t task, int) {
        const auto& a = *static_cast<const CopyArrays*>(context);
        std::memset(a.from + task * kTaskFloats, 0, kTaskFloats * sizeof(float));
        std::memset(a.to + task * kTaskFloats, 0, kTaskFloats * sizeof(float));
      },
      &arrays);
  std::vector<double> samples;
  const auto begin = Clock::now();
  while (samples.size() < kLeastCopies || seconds_since(begin) < seconds) {
    const auto start = Clock::now();
    threads.run(
        kCopyFloats / kTaskFloats,
        [](void* context, std::int64_t task, int) {
          const auto& a = *static_cast<const CopyArrays*>(context);
          copy_past_caches(a.from + task * kTaskFloats, a.to + task * kTaskFloats, kTaskFloats);
        },
        &arrays);
    samples.push_back(2.0 * static_cast<double>(from.size()) / seconds_since(start));
  }
  return percentile(samples, 50);
}

}  // namespace lln::bench
