// Reductions over the lanes of a warp; all of them get the result.
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace lln::cuda {

inline constexpr unsigned kAllLanes = 0xFFFFFFFFU;

__device__ inline float warp_max(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, step));
  return x;
}

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAllLanes, x, step);
  return x;
}

}  // namespace lln::cuda
