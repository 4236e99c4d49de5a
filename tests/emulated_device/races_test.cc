// That accesses without an order are found in kernels that are wrong, and that those of the library
// have none.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <compare>
#include <map>
#include <set>
#include <utility>

#include "conformance/run.h"
#include "cuda/launch.h"
#include "cuda/sm90/wgmma.cuh"
#include "device_run.h"

namespace lln::cuda {
namespace {

constexpr int kThreads = 128;

template <class... Parameters, class... Arguments>
void start(void (*kernel)(Parameters...), bool overlapping, Arguments... arguments) {
  LaunchShape shape{2, kThreads, 64 * 128};
  shape.overlapping = overlapping;
  launch("kernel", kernel, shape, arguments...);
}

enum class Wait { none, warp, block };
__device__ void wait_for(Wait wait) {
  if (wait == Wait::warp) __syncwarp();
  if (wait == Wait::block) __syncthreads();
}

// Every thread reads what another wrote: `ahead` threads from it.
__global__ void hand_on(int ahead, Wait wait) {
  LLN_DYNAMIC_SHARED(memory);
  auto* const numbers = reinterpret_cast<volatile int*>(memory);
  numbers[threadIdx.x] = 1;
  wait_for(wait);
  [[maybe_unused]] const int found = numbers[(threadIdx.x + ahead) % kThreads];
}
// Every thread writes what another has read.
__global__ void write_over(int ahead, Wait wait) {
  LLN_DYNAMIC_SHARED(memory);
  auto* const numbers = reinterpret_cast<volatile int*>(memory);
  [[maybe_unused]] const int found = numbers[(threadIdx.x + ahead) % kThreads];
  wait_for(wait);
  numbers[threadIdx.x] = 1;
}
// A copy is read by a thread that did not begin it.
__global__ void read_copy(const int* from, bool waits) {
  LLN_DYNAMIC_SHARED(memory);
  copy_async(shared_address(memory) + 16 * threadIdx.x, from, true);
  copy_commit();
  if (waits) copy_wait<0>();
  __syncthreads();
  [[maybe_unused]] const int found =
      reinterpret_cast<const volatile int*>(memory)[4 * ((threadIdx.x + 32) % kThreads)];
  copy_wait<0>();
}
// Products of what threads wrote, with and without the fence.
__global__ void multiply_written(bool shows) {
  LLN_DYNAMIC_SHARED(tile);
  for (unsigned i = threadIdx.x; i < 64 * 64; i += kThreads) {
    reinterpret_cast<Bf16*>(tile)[i] = __float2bfloat16(1);
  }
  if (shows) sm90::show_products();
  __syncthreads();
  float sums[8][4] = {};
  sm90::multiply<1>(sums, sm90::ByRows<64>(tile, 0), sm90::ByColumns<64>(tile, 0), true);
  sm90::commit_products();
  sm90::wait_products<0>();
}
// Both blocks write one number, or each its own.
__global__ void write_device(int* to, bool apart) {
  if (threadIdx.x == 0) to[apart ? blockIdx.x : 0] = 1;
}
// Reads what the kernel before wrote.
__global__ void read_device(const int* from, bool waits) {
  if (waits) wait_for_previous();
  [[maybe_unused]] const int found = *static_cast<const volatile int*>(from + blockIdx.x);
}

struct Numbers {
  int* data = nullptr;
  Numbers() { EXPECT_EQ(cudaMalloc(&data, 64), cudaSuccess); }
  Numbers(const Numbers&) = delete;
  Numbers& operator=(const Numbers&) = delete;
  ~Numbers() { cudaFree(data); }
};

TEST(RacesDeathTest, OfThreads) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  start(hand_on, false, 0, Wait::none);
  start(hand_on, false, 32, Wait::block);
  start(write_over, false, 32, Wait::block);
  EXPECT_DEATH(start(hand_on, false, 1, Wait::none), "race: .* of shared memory that thread");
  EXPECT_DEATH(start(hand_on, false, 32, Wait::warp), "race: .* of shared memory that thread");
  EXPECT_DEATH(start(write_over, false, 1, Wait::none), "race: .* of shared memory that thread");
  EXPECT_DEATH(start(write_over, false, 32, Wait::warp), "race: .* of shared memory that thread");
}

TEST(RacesDeathTest, OfWhatThreadsBegin) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  alignas(16) static const int from[4] = {};
  start(read_copy, false, from, true);
  EXPECT_DEATH(start(read_copy, false, from, false), "that a copy of thread .* has written");
  start(multiply_written, false, true);
  EXPECT_DEATH(start(multiply_written, false, false), "a product of warp .* reads .* has written");
}

TEST(RacesDeathTest, OfBlocksAndKernels) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const Numbers numbers;
  start(write_device, false, numbers.data, true);
  start(read_device, false, numbers.data, false);
  EXPECT_DEATH(start(write_device, false, numbers.data, false), "race: writes device memory");
  start(write_device, false, numbers.data, true);
  start(read_device, true, numbers.data, true);
  start(write_device, false, numbers.data, true);
  EXPECT_DEATH(start(read_device, true, numbers.data, false), "which may be under way");
}

}  // namespace
}  // namespace lln::cuda

namespace lln::test {
namespace {

std::int64_t cost(const Problem& p) {
  return p.batch * p.heads * (p.tokens + p.tokens_k) * (p.dim + p.dim_v);
}

// What a few cases stand for. Warps that share rows, and what they exchange, are others in each
// width of tiles.
struct Form {
  Op op;
  std::string kernel;
  int width = 0;
  bool grouped = false;
  auto operator<=>(const Form&) const = default;
};
Form form_of(const Problem& p, const std::string& kernel, bool by_width) {
  if (!by_width) return {p.op, kernel};
  const std::int64_t widest = std::max(p.dim, p.dim_v);
  const int width = widest <= 32 ? 32 : widest <= 64 ? 64 : widest <= 128 ? 128 : 256;
  return {p.op, kernel, width, p.heads != p.heads_k};
}

// The cheapest cases of every form that have so many tokens.
void expect_no_races(std::int64_t tokens, std::size_t cases_each, bool by_width) {
  std::vector<Case> all = conformance::on_device(conformance::cases(), kDevice);
  std::stable_sort(all.begin(), all.end(),
                   [](const Case& x, const Case& y) { return cost(x.problem) < cost(y.problem); });
  ThreadPool pool;
  std::map<Form, std::size_t> taken;
  std::set<std::pair<Op, std::string>> kernels;
  for (const Case& c : all) {
    if (c.problem.tokens < tokens) continue;
    for (const auto& candidate : explain(c.problem).candidates) {
      if (!candidate.refusal.empty()) continue;
      if (taken[form_of(c.problem, candidate.kernel, by_width)]++ >= cases_each) continue;
      kernels.emplace(c.problem.op, candidate.kernel);
      const std::vector<std::string> kernel = {candidate.kernel};
      for (const auto& result : conformance::run_case(c, kernel, &pool)) {
        EXPECT_EQ(result.verdict, conformance::Verdict::passed)
            << to_string(c) << " on " << result.kernel << '\n'
            << result.text;
      }
    }
  }
  for (const Op op : {Op::forward, Op::backward, Op::append}) {
    for (const std::string& kernel : kernel_names(op, DeviceKind::cuda)) {
      EXPECT_TRUE(kernels.contains({op, kernel})) << kernel << " had no " << to_string(op);
    }
  }
}

TEST(Races, TheLibraryHasNone) { expect_no_races(130, 4, false); }
TEST(Races, TheLibraryHasNoneInAnyWidth) { expect_no_races(66, 2, true); }

}  // namespace
}  // namespace lln::test
