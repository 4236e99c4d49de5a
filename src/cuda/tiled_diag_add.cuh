// Results of Diag that join those of an LLN part, which other kernels have stored: kernels without
// LLN read them where they are going to write. A lane reads the 16 bytes that it writes itself, so
// that nobody waits for anybody.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/mma.cuh"
#include "cuda/tiles.cuh"

namespace lln::cuda {

// Which kernels do that: those for bf16 up to 128 channels have LLN of their own, as its causal
// walks have Diag.
template <class T, int kDim, bool kLln>
inline constexpr bool kAddsToLln = !kLln && (std::is_same_v<T, F16> || kDim > 128);

// 8 channels of a row from `column` on; zeros where there are none.
template <class T>
__device__ inline uint4 stored_words(const T* rows, std::int64_t stride, int row, int end,
                                     int column, int dim) {
  if (row >= end || column >= dim) return {0, 0, 0, 0};
  return *reinterpret_cast<const uint4*>(rows + row * stride + column);
}

// To 16 rows whose columns are in direct order, as store_rows() has them.
template <class T, int kWidth>
__device__ inline void add_stored_rows(float (&acc)[kWidth / 8][4], const T* rows,
                                       std::int64_t stride, int first, int end, int dim) {
  const int lane = threadIdx.x & 31, row = first + (lane >> 2), column = 8 * (lane & 3);
#pragma unroll
  for (int i = 0; i < kWidth / 16; ++i) {
    const int group = i / 2, half = i % 2;
    const uint4 at = stored_words(rows, stride, row + 8 * half, end, 32 * group + column, dim);
    const std::uint32_t words[4] = {at.x, at.y, at.z, at.w};
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 pair = unpack<T>(words[n]);
      acc[4 * group + n][2 * half] += pair.x;
      acc[4 * group + n][2 * half + 1] += pair.y;
    }
  }
}

// To 16 rows of 32 columns in natural order, as store_natural() has them.
template <class T>
__device__ inline void add_stored_natural(float (&acc)[4][4], const T* rows, std::int64_t stride,
                                          int first, int end, int dim) {
  const int lane = threadIdx.x & 31, row = first + (lane >> 2);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4 at = stored_words(rows, stride, row + 8 * half, end, 8 * (lane & 3), dim);
    std::uint32_t words[4] = {at.x, at.y, at.z, at.w};
    transpose_quad(words[0], words[1], words[2], words[3]);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 pair = unpack<T>(words[n]);
      acc[n][2 * half] += pair.x;
      acc[n][2 * half + 1] += pair.y;
    }
  }
}

}  // namespace lln::cuda
