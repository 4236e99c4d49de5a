// What the emulated device does with kernels that are wrong: those of the library are not, and that
// they pass says something only if these do not.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cuda/launch.h"
#include "cuda/sm90/wgmma.cuh"
#include "lln/version.h"

namespace lln::cuda {
namespace {

constexpr int kThreads = 256;

template <class... Parameters, class... Arguments>
void start(void (*kernel)(Parameters...), int shared, Arguments... arguments) {
  launch("kernel", kernel, LaunchShape{3, kThreads, shared}, arguments...);
}

// Every thread hands a number to the next warp.
__global__ void pass_on(int* out, bool waits) {
  LLN_DYNAMIC_SHARED(memory);
  auto* const numbers = reinterpret_cast<int*>(memory);
  const auto i = static_cast<int>(threadIdx.x);
  numbers[i] = i;
  if (waits) __syncthreads();
  out[blockIdx.x * kThreads + i] = numbers[(i + 32) % kThreads];
}

// The first lane of a warp leaves a number for the others.
__global__ void leave_for_lanes(int* out, bool waits) {
  LLN_DYNAMIC_SHARED(memory);
  int& number = reinterpret_cast<int*>(memory)[threadIdx.x / 32];
  if (threadIdx.x % 32 == 0) number = 7;
  if (waits) __syncwarp();
  out[blockIdx.x * kThreads + threadIdx.x] = number;
  __syncwarp();
}

TEST(Emulator, LanesRunInEitherDirection) {
  for (const bool waits : {true, false}) {
    std::vector<int> out(3 * kThreads);
    start(leave_for_lanes, 1024, out.data(), waits);
    EXPECT_EQ(std::count(out.begin(), out.end(), 7) == 3 * kThreads, waits);
  }
}

TEST(Emulator, IsTheDeviceOfTheLibrary) {
  ASSERT_EQ(build_info().cuda.devices.size(), 1U);
  EXPECT_EQ(build_info().cuda.devices[0].name, "emulated device");
}

TEST(Emulator, WarpsRunAheadOfEachOther) {
  for (const bool waits : {true, false}) {
    int wrong = 0;
    for (int run = 0; run < 5; ++run) {
      std::vector<int> out(3 * kThreads);
      start(pass_on, kThreads * 4, out.data(), waits);
      for (int i = 0; i < 3 * kThreads; ++i) {
        wrong += out[static_cast<std::size_t>(i)] != (i + 32) % kThreads ? 1 : 0;
      }
    }
    EXPECT_EQ(wrong == 0, waits);
  }
}

__global__ void copy_in(int* out, const int* from, bool waits) {
  LLN_DYNAMIC_SHARED(memory);
  copy_async(shared_address(memory) + 16 * threadIdx.x, from + 4 * threadIdx.x, true);
  copy_commit();
  if (waits) copy_wait<0>();
  const int found = reinterpret_cast<const int*>(memory)[4 * threadIdx.x];
  copy_wait<0>();
  out[blockIdx.x * kThreads + threadIdx.x] = found;
}

TEST(Emulator, CopiesTakeTheirTime) {
  std::vector<int> from(4 * kThreads, 7), out(3 * kThreads);
  for (const bool waits : {true, false}) {
    start(copy_in, 16 * kThreads, out.data(), from.data(), waits);
    const auto there = std::count(out.begin(), out.end(), 7);
    EXPECT_EQ(there == 3 * kThreads, waits);
  }
}

// 64 x 64 = 64 x 16 times ones.
__global__ void multiply_ones(float* out, bool waits) {
  LLN_DYNAMIC_SHARED(tile);
  for (unsigned i = threadIdx.x; i < 64 * 64; i += kThreads) {
    reinterpret_cast<Bf16*>(tile)[i] = __float2bfloat16(1);
  }
  __syncthreads();
  float sums[8][4] = {};
  sm90::multiply<1>(sums, sm90::ByRows<64>(tile, 0), sm90::ByColumns<64>(tile, 0), true);
  sm90::commit_products();
  if (waits) sm90::wait_products<0>();
  out[blockIdx.x * kThreads + threadIdx.x] = sums[3][2];
  sm90::wait_products<0>();
}

TEST(Emulator, ProductsTakeTheirTime) {
  std::vector<float> out(3 * kThreads);
  for (const bool waits : {true, false}) {
    start(multiply_ones, 64 * 128, out.data(), waits);
    const auto done = std::count(out.begin(), out.end(), 16.0F);
    EXPECT_EQ(done == 3 * kThreads, waits);
  }
}

// 1 + 16 products of 2^-13 times 2^-12, each less than the last bit that is kept beside 1; or, with
// a sum that begins at 0, those products alone.
__global__ void add_small(float* out, float first) {
  const std::uint32_t a = pack<Bf16>(0x1p-13F, 0x1p-13F), b = pack<Bf16>(0x1p-12F, 0x1p-12F);
  float sums[4] = {first, first, first, first};
  mma<Bf16>(sums, a, a, a, a, b, b);
  out[blockIdx.x * kThreads + threadIdx.x] = sums[3];
}

TEST(Emulator, TensorCoresCutSumsOff) {
  std::vector<float> out(3 * kThreads);
  start(add_small, 0, out.data(), 1.0F);
  EXPECT_EQ(out[5], 1.0F);
  start(add_small, 0, out.data(), 0.0F);
  EXPECT_EQ(out[5], 0x1p-21F);
}

__global__ void write_at(int byte) {
  LLN_DYNAMIC_SHARED(memory);
  if (threadIdx.x == 0) memory[byte] = 1;
}
__global__ void leave_copies() {
  alignas(16) static const int from[4] = {};
  LLN_DYNAMIC_SHARED(memory);
  copy_async(shared_address(memory), from, true);
  copy_commit();
}
__global__ void leave_products() {
  LLN_DYNAMIC_SHARED(tile);
  float sums[8][4] = {};
  sm90::multiply<1>(sums, sm90::ByRows<64>(tile, 0), sm90::ByColumns<64>(tile, 0), true);
  sm90::commit_products();
}
__global__ void copy_unaligned() {
  alignas(16) static const int from[8] = {};
  LLN_DYNAMIC_SHARED(memory);
  copy_async(shared_address(memory), from + 1, true);
}
__global__ void count_differently() { meet(1, threadIdx.x < 32 ? 64 : 96); }
__global__ void meet_alone() {
  if (threadIdx.x < 32) meet(1, 64);
}
__global__ void part_ways() {
  if (threadIdx.x % 2 == 0) {
    __shfl_xor_sync(~0U, 1, 2);
  } else {
    __ballot_sync(~0U, 1);
  }
}

TEST(EmulatorDeathTest, FaultsEndTheProgram) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  start(write_at, 1024, 1023);
  EXPECT_DEATH(start(write_at, 1024, 1024), "byte 1024 of shared memory was written");
  EXPECT_DEATH(start(leave_copies, 1024), "ends before its copies into shared memory");
  EXPECT_DEATH(start(leave_products, 64 * 128), "ends before its products");
  EXPECT_DEATH(start(copy_unaligned, 1024), "copies 16 bytes at addresses that are no multiple");
  EXPECT_DEATH(start(count_differently, 0), "where others wait for");
  EXPECT_DEATH(start(meet_alone, 0), "all threads wait: 32 for a barrier of the block");
  EXPECT_DEATH(start(part_ways, 0), "other lanes of its warp at");
}

TEST(Emulator, LaunchesBeyondTheLimits) {
  EXPECT_THROW(start(write_at, 228 * 1024, 0), Error);
  EXPECT_THROW(launch("kernel", write_at, LaunchShape{1, 2048, 0}, 0), Error);
  start(write_at, 227 * 1024, 0);
}

}  // namespace
}  // namespace lln::cuda
