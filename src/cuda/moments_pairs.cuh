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

struct ScaleOutput {
  float* data = nullptr;
  std::int64_t sequence = 0, head = 0;
};

struct ScaleOutputs {
  ScaleOutput alpha = {}, beta = {};
  std::int64_t sequences = 0, heads_k = 0, group = 1;
};

struct Scales {
  float alpha, beta;
};

// In the workspace of the call. Without q, its moments are not given. `scales` gets alpha and beta
// of each pair by itself, where it is given.
PairMoments sum_pairs(const MatchingCall& call, bool with_q, const ScaleOutputs& scales = {},
                      const MatchingRule& rule = {});

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

__device__ inline void write_scales(const ScaleOutputs& out, std::int64_t s, std::int64_t head_k,
                                    const Scales& scales) {
  for (std::int64_t h = head_k * out.group; h < (head_k + 1) * out.group; ++h) {
    out.alpha.data[s * out.alpha.sequence + h * out.alpha.head] = scales.alpha;
  }
  out.beta.data[s * out.beta.sequence + head_k * out.beta.head] = scales.beta;
}

// Both are 1 where either has seen nothing, and NaN where either is not finite. `tokens` is the
// number of keys that count.
__device__ inline Scales scales_of(bool seen, double variance_q, double variance_k, double tokens,
                                   const MatchingRule& rule) {
  if (!seen) return {1, 1};
  if (!isfinite(variance_q) || !isfinite(variance_k)) return {NAN, NAN};
  const MatchedScales scales = matched_scales(variance_q, variance_k, tokens, rule);
  return {static_cast<float>(scales.alpha), static_cast<float>(scales.beta)};
}

__device__ inline Scales scales_of(const Moments& q, const Moments& k, int dim,
                                   const MatchingRule& rule) {
  return scales_of(q.count > 0 && k.count > 0, variance_of(q), variance_of(k), k.count / dim, rule);
}

#endif

}  // namespace lln::cuda
