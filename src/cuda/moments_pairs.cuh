// Moments of every (sequence, key head) in device memory, and the joins of moments inside a warp
// and a block: what the pass over q and k (moments_pairs.cu) and its uses (moments.cu) share.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include "cuda/moments.h"
#include "math/moments.h"

namespace lln::cuda {

inline constexpr int kMomentThreads = 256;
inline constexpr int kMomentWarps = kMomentThreads / 32;

struct PairMoments {
  const Moments* q = nullptr;  // [S, heads_k], over the query heads that share a key head
  const Moments* k = nullptr;
};

// In the workspace of the call. Without q, its moments are not given.
PairMoments sum_pairs(const MatchingCall& call, bool with_q);

inline unsigned blocks_for(std::int64_t items, std::int64_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

#ifdef __CUDACC__

__device__ inline Moments shifted_down(const Moments& m, int lanes) {
  return {__shfl_down_sync(0xFFFFFFFFU, m.count, lanes),
          __shfl_down_sync(0xFFFFFFFFU, m.mean, lanes), __shfl_down_sync(0xFFFFFFFFU, m.m2, lanes)};
}

// In a fixed order; lane 0 gets the result.
__device__ inline Moments warp_merged(Moments own) {
  for (int step = 16; step > 0; step /= 2) own = merged(own, shifted_down(own, step));
  return own;
}

// Thread 0 gets the result. `warps` is shared memory for kMomentWarps of them.
__device__ inline Moments block_merged(Moments own, Moments* warps) {
  own = warp_merged(own);
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = own;
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < kMomentWarps; ++w) own = merged(own, warps[w]);
  }
  return own;
}

#endif

}  // namespace lln::cuda
