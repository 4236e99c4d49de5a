// Sets of keys (math/state.h) on their way through registers, a channel to a warp.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/decode_call.cuh"
#include "cuda/launch.h"

namespace lln::cuda {

inline constexpr int kSetThreads = 256;
inline constexpr int kSetWarps = kSetThreads / 32;

// Of a slot with so many channels.
inline std::int64_t set_blocks(std::int64_t dim) { return blocks_for(dim, kSetWarps); }

// Which channel a warp takes; one past the last in some warps.
struct SlotChannel {
  std::int64_t slot;
  int channel;
};

__device__ inline SlotChannel find_channel(const DecodeShape& shape) {
  const auto blocks = static_cast<unsigned>((shape.d + kSetWarps - 1) / kSetWarps);
  return {blockIdx.x / blocks,
          static_cast<int>(blockIdx.x % blocks * kSetWarps + threadIdx.x / 32)};
}

// A channel of a set: its mass, and the columns 4 lane and 4 lane + 128 of its values.
struct ChannelSet {
  float m, s;
  float4 values[2];
};

__device__ inline ChannelSet load_channel(const DecodeShape& shape, const KeySet& set, int l) {
  ChannelSet sums{set.m[l], set.s[l], {}};
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int column = 4 * lane + 128 * i;
    if (column >= shape.dvp) continue;
    sums.values[i] = *reinterpret_cast<const float4*>(set.values + l * shape.dvp + column);
  }
  return sums;
}

__device__ inline void store_channel(const DecodeShape& shape, const KeySet& set, int l,
                                     const ChannelSet& sums) {
  const int lane = threadIdx.x % 32;
  __syncwarp();  // all lanes have read what is overwritten
  if (lane == 0) {
    set.m[l] = sums.m;
    set.s[l] = sums.s;
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int column = 4 * lane + 128 * i;
    if (column >= shape.dvp) continue;
    *reinterpret_cast<float4*>(set.values + l * shape.dvp + column) = sums.values[i];
  }
}

__device__ inline ChannelSet joined(const ChannelSet& x, const ChannelSet& y) {
  const JoinedMass mass = join_mass<float>(x.m, x.s, y.m, y.s);
  ChannelSet sums{mass.m, mass.s, {}};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float4 &a = x.values[i], &b = y.values[i];
    sums.values[i] = {mass.first * a.x + mass.second * b.x, mass.first * a.y + mass.second * b.y,
                      mass.first * a.z + mass.second * b.z, mass.first * a.w + mass.second * b.w};
  }
  return sums;
}

}  // namespace lln::cuda
