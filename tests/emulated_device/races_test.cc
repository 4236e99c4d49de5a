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
// Matrices that the lanes of another warp wrote.
__global__ void read_matrices(bool waits) {
  LLN_DYNAMIC_SHARED(memory);
  *reinterpret_cast<uint4*>(memory + 16 * threadIdx.x) = {1, 1, 1, 1};
  wait_for(waits ? Wait::block : Wait::warp);
  std::uint32_t x[4];
  load_matrices(x, shared_address(memory) + 16 * ((threadIdx.x + 32) % kThreads));
}
// A tile that the copy engine brings and takes away: read before it has come, written before it has
// been read.
__global__ void pass_box(CUtensorMap from, CUtensorMap to, bool waits, bool waits_again) {
  LLN_DYNAMIC_SHARED(tile);
  __shared__ sm90::Barrier barrier;
  if (threadIdx.x == 0) {
    sm90::barrier_init(barrier, 1);
    sm90::barriers_ready();
  }
  __syncthreads();
  const int block = static_cast<int>(blockIdx.x);
  if (threadIdx.x == 0) {
    sm90::arrive_expecting(barrier, 64 * 128);
    sm90::load_box(tile, from, 0, 0, 0, block, barrier);
  }
  if (waits) sm90::wait(barrier, 0);
  auto* const numbers = reinterpret_cast<volatile int*>(tile);
  [[maybe_unused]] const int found = numbers[threadIdx.x];
  sm90::wait(barrier, 0);
  __syncthreads();
  if (threadIdx.x == 0) {
    sm90::store_box(to, tile, 0, 0, 0, block);
    sm90::stores_commit();
    if (waits_again) sm90::stores_wait_read<0>();
  }
  __syncthreads();
  numbers[threadIdx.x] = 1;
  if (threadIdx.x == 0) sm90::stores_wait_read<0>();
}
// Products of a tile that is written over, after they have ended or before.
__global__ void write_operands(bool waits) {
  LLN_DYNAMIC_SHARED(tile);
  for (unsigned i = threadIdx.x; i < 64 * 64; i += kThreads) {
    reinterpret_cast<Bf16*>(tile)[i] = __float2bfloat16(1);
  }
  sm90::show_products();
  __syncthreads();
  float sums[8][4] = {};
  sm90::multiply<1>(sums, sm90::ByRows<64>(tile, 0), sm90::ByColumns<64>(tile, 0), true);
  sm90::commit_products();
  if (waits) sm90::wait_products<0>();
  reinterpret_cast<volatile int*>(tile)[threadIdx.x] = 1;
  sm90::wait_products<0>();
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
// Lets the next kernel start.
__global__ void go_ahead(bool waits) {
  if (waits) wait_for_previous();
  let_next_start();
}
// Reads what the kernel before wrote.
__global__ void read_device(const int* from, bool waits) {
  if (waits) wait_for_previous();
  [[maybe_unused]] const int found = *static_cast<const volatile int*>(from + blockIdx.x);
}

struct Numbers {
  int* data = nullptr;
  explicit Numbers(std::size_t bytes = 64) { EXPECT_EQ(cudaMalloc(&data, bytes), cudaSuccess); }
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

// [2, 1, 64, 64] of bf16.
CUtensorMap box_map(void* data) {
  const cuuint64_t sizes[4] = {64, 64, 1, 2}, strides[3] = {128, 64 * 128, 64 * 128};
  const cuuint32_t box[4] = {64, 64, 1, 1}, steps[4] = {1, 1, 1, 1};
  CUtensorMap map;
  EXPECT_EQ(
      cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, data, sizes, strides, box,
                             steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
      CUDA_SUCCESS);
  return map;
}

// The schedule says which side is found at it.
TEST(RacesDeathTest, OfEngines) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const Numbers from(2 * 64 * 128), to(2 * 64 * 128);
  const CUtensorMap source = box_map(from.data), target = box_map(to.data);
  start(pass_box, false, source, target, true, true);
  EXPECT_DEATH(start(pass_box, false, source, target, false, true),
               "race: .*a box that was loaded");
  EXPECT_DEATH(start(pass_box, false, source, target, true, false), "race: .*a box sent by warp 0");
  start(write_operands, false, true);
  EXPECT_DEATH(start(write_operands, false, false), "race: .*a product of warp");
  start(read_matrices, false, true);
  EXPECT_DEATH(start(read_matrices, false, false), "race: .* of shared memory that");
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
  start(go_ahead, true, true);
  EXPECT_DEATH(start(go_ahead, true, false), "has not waited for the one before");
}

}  // namespace
}  // namespace lln::cuda

namespace lln::test {
namespace {

std::int64_t cost(const Problem& p) {
  return p.batch * p.heads * (p.tokens + p.tokens_k) * (p.dim + p.dim_v);
}

// What a few cases stand for. Warps that share rows, and what they exchange, are others in each
// width of tiles; LLN+Diag is in some families the kernels of each, one after the other.
struct Form {
  Op op;
  std::string kernel;
  bool causal = false, both = false, parameters = false;
  int width = 0;
  bool grouped = false;
  auto operator<=>(const Form&) const = default;
};
Form form_of(const Case& c, const std::string& kernel, bool by_width) {
  const Problem& p = c.problem;
  const bool both = p.kind == Kind::lln_diag;
  const bool parameters = p.op == Op::backward && c.parameter_gradients;
  if (!by_width) return {p.op, kernel, p.causal, both, parameters};
  const std::int64_t widest = std::max(p.dim, p.dim_v);
  const int width = widest <= 32 ? 32 : widest <= 64 ? 64 : widest <= 128 ? 128 : 256;
  return {p.op, kernel, p.causal, both, parameters, width, p.heads != p.heads_k};
}

// The cheapest cases of every form that have so many tokens, and one with gradients of parameters.
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
      // Tensors with gaps are not aligned: the families leave them to the plain one.
      const bool aligned = c.layout != conformance::Layout::gaps || c.problem.op == Op::append;
      if (!aligned && candidate.kernel != "cuda-plain") continue;
      const Form form = form_of(c, candidate.kernel, by_width);
      if (taken[form]++ >= (form.parameters ? 1 : cases_each)) continue;
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

TEST(Races, TheLibraryHasNone) { expect_no_races(130, 2, false); }
TEST(Races, TheLibraryHasNoneInAnyWidth) { expect_no_races(66, 2, true); }

}  // namespace
}  // namespace lln::test
