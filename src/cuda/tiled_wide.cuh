// The backward pass of heads with 129 to 256 channels: what its kernels over rows and over keys
// share. Results of 16 rows do not fit into the registers of one warp, so that 16 warps share tiles
// of 32 rows, each with 32 channels of the results; a matrix of 256 x 256 stays in shared memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tile_parts.cuh"

namespace lln::cuda {

inline constexpr int kWideDim = 256;
inline constexpr int kWideGroups = kWideDim / 32;  // of channels, a warp each
inline constexpr int kWideTile = 32;               // rows
inline constexpr int kWideThreads = kWideTile / 16 * kWideGroups * 32;
inline constexpr int kWideStages = 2;
inline constexpr int kWideTileBytes = kWideTile * kWideDim * 2;
inline constexpr int kWideMatrixBytes = kWideDim * kWideDim * 2;

// Those of so many channels.
__device__ inline int wide_groups(int channels) { return (channels + 31) / 32; }

// Starts copying rows of two tensors from row `first` on, zeros past `count`; of the second nothing
// where not `of_y`. A thread copies the same columns of all rows.
template <class T>
__device__ inline void copy_wide_tiles(unsigned char (&stage)[2][kWideTileBytes], const T* x,
                                       std::int64_t x_stride, int x_dim, const T* y,
                                       std::int64_t y_stride, int y_dim, int first, int count,
                                       bool of_y) {
  copy_tile<kWideTile, kWideDim, kWideThreads>(stage[0], x, x_stride, first, x_dim,
                                               [&](int row) { return row < count; });
  copy_tile<kWideTile, kWideDim, kWideThreads>(stage[1], y, y_stride, first, y_dim,
                                               [&](int row) { return of_y && row < count; });
}

// acc += x M^T for 16 kBands rows x of a tile, from row `first` on, and 32 rows of M from `row` on,
// where M is a tile of fill_direct_tile(): sums over `groups` groups of columns, results in direct
// order.
template <class T, int kBands>
__device__ inline void multiply_wide_transposed(float (&acc)[kBands][4][4],
                                                const unsigned char* tile, int first,
                                                const unsigned char* matrix, int row, int groups) {
  const int lane = threadIdx.x & 31;
  const std::uint32_t from =
      shared_address(tile) + tile_offset<kWideDim>(first + (lane & 15), lane >> 4);
  const std::uint32_t by =
      shared_address(matrix) + tile_offset<kWideDim>(row + (lane & 7), lane >> 3);
#pragma unroll 2
  for (int group = 0; group < groups; ++group) {
    // A group is four pieces; rows are 512 bytes and the permutation repeats every 8 of them.
    const std::uint32_t pieces = static_cast<std::uint32_t>(group) << 6;
    std::uint32_t b[4][4];
#pragma unroll
    for (int n = 0; n < 4; ++n) load_matrices(b[n], (by ^ pieces) + n * 8 * kWideDim * 2);
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
      std::uint32_t x[2][4];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        load_matrices(x[i], (from ^ pieces ^ (i << 5)) + band * 16 * kWideDim * 2);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        mma<T>(acc[band][n], x[0][0], x[0][1], x[0][2], x[0][3], b[n][0], b[n][1]);
        mma<T>(acc[band][n], x[1][0], x[1][1], x[1][2], x[1][3], b[n][2], b[n][3]);
      }
    }
  }
}

// acc += x M for the same and 32 columns from `column` on: sums over `groups` groups of rows of M,
// results in natural order.
template <class T, int kBands>
__device__ inline void multiply_wide(float (&acc)[kBands][4][4], const unsigned char* tile,
                                     int first, const unsigned char* matrix, int column,
                                     int groups) {
  const int lane = threadIdx.x & 31;
  const std::uint32_t from = tile_offset<kWideDim>(first + (lane >> 2), lane & 3);
  const std::uint32_t by =
      shared_address(matrix) +
      tile_offset<kWideDim>(((lane >> 3) & 1) * 8 + (lane & 7), column / 8 + (lane >> 4));
#pragma unroll 2
  for (int group = 0; group < groups; ++group) {
    std::uint32_t b[2][2][4];  // [step of 16 rows][16 columns]
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      load_transposed(b[i / 2][i % 2],
                      (by ^ (i % 2 << 5)) + (2 * group + i / 2) * 16 * kWideDim * 2);
    }
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
      const unsigned char* const at =
          tile + (from ^ (static_cast<std::uint32_t>(group) << 6)) + band * 16 * kWideDim * 2;
      const uint4 x = *reinterpret_cast<const uint4*>(at);
      const uint4 y = *reinterpret_cast<const uint4*>(at + 8 * kWideDim * 2);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        mma<T>(acc[band][n], x.x, y.x, x.y, y.y, b[0][n / 2][n % 2 * 2],
               b[0][n / 2][n % 2 * 2 + 1]);
        mma<T>(acc[band][n], x.z, y.z, x.w, y.w, b[1][n / 2][n % 2 * 2],
               b[1][n / 2][n % 2 * 2 + 1]);
      }
    }
  }
}

}  // namespace lln::cuda
