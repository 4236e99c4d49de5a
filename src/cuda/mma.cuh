// What the tiled kernels build on their instructions: the two 16-bit types behind one interface,
// where a number of a tile lies in shared memory, and sums over a quad of lanes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/instructions.cuh"

namespace lln::cuda {

inline constexpr float kLog2E = 1.4426950408889634F;
inline constexpr float kLn2 = 0.6931471805599453F;
inline constexpr float kLargestExponent = 1e38F;  // kExponentLimit of math/feature_map.h

__device__ inline float clamp_keep_nan(float x) {
  return max_keep_nan(min_keep_nan(x, kLargestExponent), -kLargestExponent);
}

// The inverse of pack().
template <class T>
__device__ float2 unpack(std::uint32_t word);
template <>
__device__ inline float2 unpack<Bf16>(std::uint32_t word) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xFFFF0000U)};
}
template <>
__device__ inline float2 unpack<F16>(std::uint32_t word) {
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}

// A tile in shared memory: rows of kWidth 16-bit numbers, whose 16-byte pieces are permuted so that
// both ways of reading are free of bank conflicts: eight rows at one piece (load_transposed), and
// two neighbouring rows at four neighbouring pieces (direct fragments, tiles.cuh).
template <int kWidth>
__device__ inline std::uint32_t tile_offset(int row, int piece) {
  if constexpr (kWidth == 32) {
    return static_cast<std::uint32_t>(row * 64 + ((piece ^ ((row >> 1) & 3)) << 4));
  } else {
    const int turn = ((row & 1) << 2) | (row & 2) | ((row >> 2) & 1);
    return static_cast<std::uint32_t>(row * kWidth * 2 + ((piece ^ turn) << 4));
  }
}

__device__ inline float quad_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(0xFFFFFFFFU, x, 1));
  return fmaxf(x, __shfl_xor_sync(0xFFFFFFFFU, x, 2));
}
__device__ inline float quad_sum(float x) {
  x += __shfl_xor_sync(0xFFFFFFFFU, x, 1);
  return x + __shfl_xor_sync(0xFFFFFFFFU, x, 2);
}

}  // namespace lln::cuda
