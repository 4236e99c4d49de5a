// Parts of tiles for warps that share one: each holds some of the columns of its rows. A matrix in
// direct order is a tile, too, and serves products with itself and with its transpose.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiles.cuh"

namespace lln::cuda {

// Words first_column / 2 .. of rows first + g and + 8 of a tile that is kWidth wide.
template <int kWidth, int kHeld>
__device__ inline void read_columns(RowWords<kHeld>& x, const unsigned char* tile, int first,
                                    int first_column) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int i = 0; i < kHeld / 16; ++i) {
    const uint4 words = *reinterpret_cast<const uint4*>(
        tile + tile_offset<kWidth>(first + g + 8 * (i % 2), first_column / 8 + 4 * (i / 2) + t));
    x[i / 2][i % 2][0] = words.x;
    x[i / 2][i % 2][1] = words.y;
    x[i / 2][i % 2][2] = words.z;
    x[i / 2][i % 2][3] = words.w;
  }
}

template <int kWidth, int kHeld>
__device__ inline void write_columns(unsigned char* tile, int first, int first_column,
                                     const RowWords<kHeld>& x) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int i = 0; i < kHeld / 16; ++i) {
    *reinterpret_cast<uint4*>(
        tile + tile_offset<kWidth>(first + g + 8 * (i % 2), first_column / 8 + 4 * (i / 2) + t)) = {
        x[i / 2][i % 2][0], x[i / 2][i % 2][1], x[i / 2][i % 2][2], x[i / 2][i % 2][3]};
  }
}

// acc += rows first .. + 15 of a tile times 8 * kCount rows of another, transposed.
template <class T, int kDepth, int kCount>
__device__ inline void multiply_tiles(float (&acc)[kCount][4], const unsigned char* rows, int first,
                                      const unsigned char* columns) {
  const int lane = threadIdx.x & 31;
  const std::uint32_t from = shared_address(rows), by = shared_address(columns);
  // Operands that are asked for far ahead take registers.
#pragma unroll(kDepth <= 128 ? kDepth / 32 : 2)
  for (int group = 0; group < kDepth / 32; ++group) {
    std::uint32_t x[2][4];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      load_matrices(
          x[i], from + tile_offset<kDepth>(first + (lane & 15), 4 * group + 2 * i + (lane >> 4)));
    }
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      std::uint32_t b[4];
      load_matrices(b, by + tile_offset<kDepth>(8 * n + (lane & 7), 4 * group + (lane >> 3)));
      mma<T>(acc[n], x[0][0], x[0][1], x[0][2], x[0][3], b[0], b[1]);
      mma<T>(acc[n], x[1][0], x[1][1], x[1][2], x[1][3], b[2], b[3]);
    }
  }
}

// acc += y * rows 16 step .. + 15 of a tile, kHeld columns from first_column on: natural order.
template <class T, int kWidth, int kHeld>
__device__ inline void multiply_step(float (&acc)[kHeld / 8][4], const std::uint32_t (&y)[4],
                                     const unsigned char* tile, int step, int first_column) {
  const int lane = threadIdx.x & 31;
  const std::uint32_t base = shared_address(tile);
  const int row = 16 * step + ((lane >> 3) & 1) * 8 + (lane & 7);
#pragma unroll
  for (int n = 0; n < kHeld / 16; ++n) {
    std::uint32_t b[4];
    load_transposed(b, base + tile_offset<kWidth>(row, first_column / 8 + 2 * n + (lane >> 4)));
    mma<T>(acc[2 * n], y[0], y[1], y[2], y[3], b[0], b[1]);
    mma<T>(acc[2 * n + 1], y[0], y[1], y[2], y[3], b[2], b[3]);
  }
}

// A tile of an f32 matrix [channel, column] times factor(channel, column), whose rows are in direct
// order: row 8 n + g is the channel of column g of the n-th result. Its product with weights in
// direct order and that of rows with its transpose both read it as it is. Zeros past `depth` and
// `width`, a multiple of 8.
template <class T, int kDim, int kThreads, class Factor>
__device__ inline void fill_direct_tile(unsigned char* tile, const float* matrix,
                                        std::int64_t row_stride, int depth, int width,
                                        Factor&& factor) {
  for (int i = static_cast<int>(threadIdx.x); i < kDim * kDim / 8; i += kThreads) {
    const int channel = i / (kDim / 8), piece = i % (kDim / 8);
    std::uint32_t words[4] = {0, 0, 0, 0};
    if (channel < depth && 8 * piece < width) {
      const auto* const from =
          reinterpret_cast<const float4*>(matrix + channel * row_stride + 8 * piece);
      const float4 low = from[0], high = from[1];
      const float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        words[j] = pack<T>(x[2 * j] * factor(channel, 8 * piece + 2 * j),
                           x[2 * j + 1] * factor(channel, 8 * piece + 2 * j + 1));
      }
    }
    const ColumnPlace place = column_place<Columns::direct>(channel);
    *reinterpret_cast<uint4*>(tile + tile_offset<kDim>(8 * place.n + place.g, piece)) = {
        words[0], words[1], words[2], words[3]};
  }
}

}  // namespace lln::cuda
