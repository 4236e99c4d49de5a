// Weights of rows, W = softmax over channels of (alpha q + c), in a factored form that costs four
// instructions an element: W_l = e_l w_l / sum_l e_l w_l with e = 2^(a - reference of the row) and
// w = 2^(c - largest c), the latter folded into the matrices that W is multiplied with. Exponents a
// are moderate nearly always, and then the reference is 0; the sums prove it, and where they do not
// the reference is found from the row's largest a + c. Where c itself spreads too far, w is 1 and
// c joins the exponent.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_call.h"
#include "cuda/tiles.cuh"

namespace lln::cuda {

// What rows of one head need to know of c, in shared memory.
template <int kDim>
struct RowExponents {
  float c[kDim];      // in units of log2; -inf past dim
  float added[kDim];  // to the exponent: 0, or c where c spreads too far; -inf past dim
  float w[kDim];      // 0 past dim
  uint4 packed_w[kDim / 8];
};

// Exponents of c that spread less than this leave f32 and bf16 products far from underflow.
inline constexpr float kWidestSpread = 60;

// Fills it; all threads of the block take part. Returns the largest c that was taken out of w, the
// same in all threads.
template <class T, int kDim>
__device__ inline float fill_exponents(RowExponents<kDim>& exponents, const float* c, int dim) {
  const int lane = threadIdx.x & 31;
  float top = -kLargestExponent, least = kLargestExponent;
#pragma unroll
  for (int l = lane; l < kDim; l += 32) {
    if (l >= dim) continue;
    const float x = c[l] * kLog2E;
    top = fmaxf(top, x);
    least = x > -kLargestExponent ? fminf(least, x) : least;
  }
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFU, top, step));
    least = fminf(least, __shfl_xor_sync(0xFFFFFFFFU, least, step));
  }
  // Not where no channel has a key: its weights are then 0, which large e must not meet.
  const bool folded = std::is_same_v<T, Bf16> && least <= top && top - least <= kWidestSpread;
  for (int l = static_cast<int>(threadIdx.x); l < kDim; l += static_cast<int>(blockDim.x)) {
    const float x = l < dim ? c[l] * kLog2E : -INFINITY;
    exponents.c[l] = x;
    exponents.added[l] = l < dim && folded ? 0 : x;
    exponents.w[l] = l >= dim ? 0 : folded ? exp2f(x - top) : 1;
  }
  __syncthreads();
  for (int i = static_cast<int>(threadIdx.x); i < kDim / 8; i += static_cast<int>(blockDim.x)) {
    const float* const w = exponents.w + 8 * i;
    exponents.packed_w[i] = {pack<T>(w[0], w[1]), pack<T>(w[2], w[3]), pack<T>(w[4], w[5]),
                             pack<T>(w[6], w[7])};
  }
  return folded ? top : 0;
}

// e of 16 rows with the reference that fits each of them.
template <class T, int kDim>
__device__ inline void careful_weights(RowWords<kDim>& q, const RowExponents<kDim>& exponents,
                                       float scale, float taken_out) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = -kLargestExponent;
#pragma unroll
    for (int group = 0; group < kDim / 32; ++group) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 pair = unpack<T>(q[group][half][i / 2]);
        const float a = clamp_keep_nan((i % 2 == 0 ? pair.x : pair.y) * scale);
        top = fmaxf(top, a + exponents.c[32 * group + 8 * t + i]);
      }
    }
    const float reference = quad_max(top) - taken_out;
#pragma unroll
    for (int group = 0; group < kDim / 32; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack<T>(q[group][half][i]);
        const float* const added = exponents.added + 32 * group + 8 * t + 2 * i;
        q[group][half][i] =
            pack<T>(exp2_fast(clamp_keep_nan(pair.x * scale) + added[0] - reference),
                    exp2_fast(clamp_keep_nan(pair.y * scale) + added[1] - reference));
      }
    }
  }
}

// e of 16 rows with reference 0.
template <class T, int kDim>
__device__ inline void moderate_weights(RowWords<kDim>& q, float scale) {
#pragma unroll
  for (int group = 0; group < kDim / 32; ++group) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 pair = unpack<T>(q[group][i / 4][i % 4]);
      q[group][i / 4][i % 4] = pack<T>(exp2_fast(pair.x * scale), exp2_fast(pair.y * scale));
    }
  }
}

// Whether sums over e w (rows g and g + 8 in [0] and [2]) prove that reference 0 was good enough,
// in all rows of the warp.
template <int kDim>
__device__ inline bool trusted(const float (&sum)[4], const RowExponents<kDim>& exponents) {
  const bool good = sum[0] >= 0x1p-60F && sum[2] >= 0x1p-60F && sum[0] <= 0x1p40F &&
                    sum[2] <= 0x1p40F && exponents.added[0] == 0;
  return __all_sync(0xFFFFFFFFU, good);
}

__device__ inline float inverse_of(float sum) { return sum == 0 ? 0 : 1 / sum; }

}  // namespace lln::cuda
