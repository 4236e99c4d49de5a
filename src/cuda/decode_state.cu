// What a decode state on a device does with its own memory: becoming empty, being followed by
// another state, and copies. Math and layout are those of math/state.h.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/decode.h"
#include "cuda/launch.h"

namespace lln::cuda {
namespace {

constexpr int kThreads = 256;

__global__ void __launch_bounds__(kThreads)
    clear_kernel(const DecodeShape shape, const DecodeSlots slots, std::int64_t first) {
  const std::int64_t index = first + blockIdx.x;
  float* const memory = shape.slot(slots.memory, index).all.m;
  for (std::int64_t i = threadIdx.x; i < shape.floats(); i += kThreads) {
    // Both sets begin with their references.
    const bool reference =
        i < shape.dp || (i >= shape.set_floats() && i < shape.set_floats() + shape.dp);
    memory[i] = reference ? kNoReference : 0;
  }
  if (threadIdx.x == 0) slots.tokens[index] = 0;
}

// A warp takes a channel: `into` becomes the union with `other` (null: with nothing).
__device__ void merge_channel(const DecodeShape& shape, const KeySet& into, const KeySet& other,
                              std::int64_t l) {
  const JoinedMass joined = join_mass(into.m[l], into.s[l], other.m[l], other.s[l]);
  for (std::int64_t c = threadIdx.x % 32; c < shape.dvp; c += 32) {
    float& x = into.values[l * shape.dvp + c];
    x = joined.first * x + joined.second * other.values[l * shape.dvp + c];
  }
  __syncwarp();
  if (threadIdx.x % 32 == 0) {
    into.m[l] = joined.m;
    into.s[l] = joined.s;
  }
  __syncwarp();
}

__device__ void clear_channel(const DecodeShape& shape, const KeySet& set, std::int64_t l) {
  for (std::int64_t c = threadIdx.x % 32; c < shape.dvp; c += 32) {
    set.values[l * shape.dvp + c] = 0;
  }
  if (threadIdx.x % 32 == 0) {
    set.m[l] = kNoReference;
    set.s[l] = 0;
  }
  __syncwarp();
}

__global__ void __launch_bounds__(kThreads)
    merge_kernel(const DecodeShape shape, const DecodeSlots into, const DecodeSlots later) {
  const std::int64_t index = blockIdx.x;
  const std::int64_t added = later.tokens[index];
  if (added == 0) return;
  const DecodeSlot own = shape.slot(into.memory, index);
  const DecodeSlot other = shape.slot(later.memory, index);
  for (std::int64_t l = threadIdx.x / 32; l < shape.d; l += kThreads / 32) {
    merge_channel(shape, own.all, own.recent, l);
    clear_channel(shape, own.recent, l);
    merge_channel(shape, own.all, other.all, l);
    merge_channel(shape, own.recent, other.recent, l);
  }
  for (std::int64_t i = threadIdx.x; i < shape.block * (shape.dp + shape.dvp); i += kThreads) {
    own.block_k[i] = other.block_k[i];
  }
  if (threadIdx.x == 0) into.tokens[index] += added;
}

void copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind, void* stream) {
  check(cudaMemcpyAsync(to, from, bytes, kind, static_cast<cudaStream_t>(stream)),
        "cudaMemcpyAsync");
}

void wait(void* stream) {
  check(cudaStreamSynchronize(static_cast<cudaStream_t>(stream)), "cudaStreamSynchronize");
}

}  // namespace

void decode_clear(const DecodeShape& shape, const DecodeSlots& slots, std::int64_t first,
                  std::int64_t count, void* stream) {
  launch("clear_kernel", clear_kernel,
         LaunchShape{count, kThreads, 0, static_cast<cudaStream_t>(stream)}, shape, slots, first);
}

void decode_merge(const DecodeShape& shape, const DecodeSlots& into, const DecodeSlots& later,
                  std::int64_t count, void* stream) {
  launch("merge_kernel", merge_kernel,
         LaunchShape{count, kThreads, 0, static_cast<cudaStream_t>(stream)}, shape, into, later);
}

void copy_on_device(void* to, const void* from, std::size_t bytes, void* stream) {
  copy(to, from, bytes, cudaMemcpyDeviceToDevice, stream);
}

void copy_to_host(void* to, const void* from, std::size_t bytes, void* stream) {
  copy(to, from, bytes, cudaMemcpyDeviceToHost, stream);
  wait(stream);
}

void copy_from_host(void* to, const void* from, std::size_t bytes, void* stream) {
  copy(to, from, bytes, cudaMemcpyHostToDevice, stream);
  wait(stream);
}

}  // namespace lln::cuda
