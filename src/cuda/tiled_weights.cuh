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
  uint4 packed_rest[kDim / 8];  // w - packed_w: sums over e w that must agree with w itself
};

// Exponents of c that spread less than this leave f32 and bf16 products far from underflow.
inline constexpr float kWidestSpread = 60;

// A number of each channel, those of channels lane + 32 i in every warp: asked for when this is
// made, so that memory answers while something else is waited for.
template <int kDim>
class ChannelNumbers {
 public:
  // `other`: of channels from `dim` on.
  __device__ ChannelNumbers(const float* numbers, int dim, float other = 0) {
#pragma unroll
    for (int i = 0; i < kDim / 32; ++i) {
      const int l = static_cast<int>(threadIdx.x & 31) + 32 * i;
      own_[i] = l < dim ? numbers[l] : other;
    }
  }
  // By the lane l % 32.
  __device__ float of(int l) const {
    float x = own_[0];
#pragma unroll
    for (int i = 1; i < kDim / 32; ++i) x = l < 32 * i ? x : own_[i];
    return x;
  }

 private:
  float own_[kDim / 32];
};

// Fills it; so many threads of the block take part, whole warps, of which this one is `thread`, and
// meet at `barrier`. Returns the largest c that was taken out of w, the same in all threads.
template <class T, int kDim>
__device__ inline float fill_exponents(RowExponents<kDim>& exponents, const ChannelNumbers<kDim>& c,
                                       int dim, int thread, int threads, int barrier) {
  const int lane = threadIdx.x & 31;
  float top = -kLargestExponent, least = kLargestExponent;
#pragma unroll
  for (int l = lane; l < kDim; l += 32) {
    if (l >= dim) continue;
    const float x = c.of(l) * kLog2E;
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
  for (int l = thread; l < kDim; l += threads) {
    const float x = l < dim ? c.of(l) * kLog2E : -INFINITY;
    exponents.c[l] = x;
    exponents.added[l] = l < dim && folded ? 0 : x;
    exponents.w[l] = l >= dim ? 0 : folded ? exp2f(x - top) : 1;
  }
  meet(barrier, threads);
  for (int i = thread; i < kDim / 2; i += threads) {
    const float2 w = *reinterpret_cast<const float2*>(exponents.w + 2 * i);
    const std::uint32_t upper = pack<T>(w.x, w.y);
    const float2 taken = unpack<T>(upper);
    reinterpret_cast<std::uint32_t*>(exponents.packed_w)[i] = upper;
    reinterpret_cast<std::uint32_t*>(exponents.packed_rest)[i] =
        pack<T>(w.x - taken.x, w.y - taken.y);
  }
  return folded ? top : 0;
}

// The same by all threads of the block. Channels of padding, from `channels` on, hold no keys.
template <class T, int kDim>
__device__ inline float fill_exponents(RowExponents<kDim>& exponents, const float* c, int dim,
                                       int channels) {
  return fill_exponents<T, kDim>(exponents, ChannelNumbers<kDim>(c, channels, -INFINITY), dim,
                                 static_cast<int>(threadIdx.x), static_cast<int>(blockDim.x), 0);
}

// The largest a + c of one row of each quad, rows g or (`half`) g + 8; `c` of the first channel.
template <class T, int kDim>
__device__ inline float largest_exponent(const RowWords<kDim>& q, int half, const float* c,
                                         float scale) {
  const int t = threadIdx.x & 3;
  float top = -kLargestExponent;
#pragma unroll
  for (int group = 0; group < kDim / 32; ++group) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 pair = unpack<T>(q[group][half][i / 2]);
      const float a = clamp_keep_nan((i % 2 == 0 ? pair.x : pair.y) * scale);
      top = fmaxf(top, a + c[32 * group + 8 * t + i]);
    }
  }
  return quad_max(top);
}

// e of these rows; `added` of the first channel.
template <class T, int kDim>
__device__ inline void weights_below(RowWords<kDim>& q, int half, const float* added, float scale,
                                     float reference) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int group = 0; group < kDim / 32; ++group) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack<T>(q[group][half][i]);
      const float* const x = added + 32 * group + 8 * t + 2 * i;
      q[group][half][i] = pack<T>(exp2_fast(clamp_keep_nan(pair.x * scale) + x[0] - reference),
                                  exp2_fast(clamp_keep_nan(pair.y * scale) + x[1] - reference));
    }
  }
}

// e of 16 rows with the reference that fits each of them.
template <class T, int kDim>
__device__ inline void careful_weights(RowWords<kDim>& q, const RowExponents<kDim>& exponents,
                                       float scale, float taken_out) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float top = largest_exponent<T, kDim>(q, half, exponents.c, scale);
    weights_below<T, kDim>(q, half, exponents.added, scale, top - taken_out);
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
