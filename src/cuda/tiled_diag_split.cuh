// How warps share a tile of 64 rows or keys in the backward passes of Diag: four groups of 16 rows.
// Where results of 16 rows do not fit into the registers of a warp, two warps work on a group: each
// computes the scores of half the other tile, and holds half the columns of the results.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_diag_walk.cuh"

namespace lln::cuda {

template <int kDim>
struct DiagSplit {
  static constexpr int kWarps = kDim <= 64 ? 1 : 2;  // of a group of 16 rows
  static constexpr int kThreads = kDiagThreads * kWarps;
  static constexpr int kHeld = kDim / kWarps;         // columns of results a warp
  static constexpr int kScored = kDiagTile / kWarps;  // of the other tile a warp
  static constexpr int kTileBytes = kDiagTile * kDim * 2;
  static constexpr int kWordBytes = kWarps == 1 ? 0 : kDiagTile * kDiagTile * 2;  // WarpWords

  int group, half;

  __device__ DiagSplit()
      : group(static_cast<int>(threadIdx.x >> 5) % 4),
        half(static_cast<int>(threadIdx.x >> 5) / 4) {}

  __device__ int first_row() const { return 16 * group; }
  __device__ int first_column() const { return half * kHeld; }
  // Where the rows begin that this warp takes of the other tile.
  __device__ int scored() const { return half * kScored; }
  // Waits for the other warp of the group.
  __device__ void join() const {
    if constexpr (kWarps > 1) meet(group + 1, 32 * kWarps);
  }
};

// What the two warps of a group tell each other of a row.
struct SharedRow {
  float top, mass, dot;
};

// Left operands of 16 x 64 that two warps made half of each, in shared memory.
template <class Split>
struct WarpWords {
  uint4* words;  // [group, step, lane]

  __device__ void put(const Split& split, int step, const std::uint32_t (&a)[4]) const {
    words[(split.group * 4 + step) * 32 + (threadIdx.x & 31)] = {a[0], a[1], a[2], a[3]};
  }
  __device__ void get(const Split& split, int step, std::uint32_t (&a)[4]) const {
    const uint4 word = words[(split.group * 4 + step) * 32 + (threadIdx.x & 31)];
    a[0] = word.x;
    a[1] = word.y;
    a[2] = word.z;
    a[3] = word.w;
  }
};

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
#pragma unroll
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

// A tile times a factor for each column.
template <class T, int kWidth, int kThreads>
__device__ inline void scale_columns(unsigned char* tile, const float* factors) {
  for (int i = static_cast<int>(threadIdx.x); i < kDiagTile * kWidth / 8; i += kThreads) {
    const int piece = i % (kWidth / 8);
    auto& at = *reinterpret_cast<uint4*>(tile + tile_offset<kWidth>(i / (kWidth / 8), piece));
    std::uint32_t words[4] = {at.x, at.y, at.z, at.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 pair = unpack<T>(words[j]);
      const float* const factor = factors + 8 * piece + 2 * j;
      words[j] = pack<T>(pair.x * factor[0], pair.y * factor[1]);
    }
    at = {words[0], words[1], words[2], words[3]};
  }
}

// Scores become -inf and their gradients 0 where bit j of `seen` (rows lane / 4 and + 8) says that
// a row does not see column j.
template <int kCount>
__device__ inline void mask_pairs(float (&scores)[kCount][4], float (&gradients)[kCount][4],
                                  const std::uint64_t (&seen)[2]) {
  const bool all = seen[0] == ~std::uint64_t{0} && seen[1] == ~std::uint64_t{0};
  if (__all_sync(0xFFFFFFFFU, all)) return;
  const int t = threadIdx.x & 3;
  const std::uint64_t own[2] = {seen[0] >> (2 * t), seen[1] >> (2 * t)};
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (((own[i >> 1] >> (8 * n + (i & 1))) & 1) == 0) {
        scores[n][i] = -INFINITY;
        gradients[n][i] = 0;
      }
    }
  }
}

}  // namespace lln::cuda
