// The products of a block of causal LLN for 129 to 256 channels: what its tokens have of the sums
// over other pieces, and of the tokens of their own piece.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_wide_causal_tiles.cuh"

namespace lln::cuda {

// Which 64 rows a block has: those with the most pairs first.
struct WideCausalTile {
  std::uint32_t piece;
  int tile;
  __device__ WideCausalTile()
      : piece(blockIdx.x / kWideCausalTiles),
        tile(kWideCausalTiles - 1 - static_cast<int>(blockIdx.x % kWideCausalTiles)) {}
};

// The matrix that the tokens of a block meet; null: there is none.
struct WideCausalMatrix {
  const Bf16* at = nullptr;
  int dim, dim_v;

  __device__ WideCausalMatrix(const WideCausalCall& wide, std::int64_t slot, bool there)
      : at(there ? wide.matrices + slot * wide.causal.call.dim * wide.causal.call.dim_v : nullptr),
        dim(static_cast<int>(wide.causal.call.dim)),
        dim_v(static_cast<int>(wide.causal.call.dim_v)) {}

  // Slabs of 64 rows, or of 64 columns where it is transposed.
  template <bool kTransposed>
  __device__ int slabs() const {
    return at == nullptr ? 0 : ((kTransposed ? dim_v : dim) + kChunk - 1) / kChunk;
  }
  template <bool kTransposed>
  __device__ void copy(unsigned char* to, int slab) const {
    using Shape = WideCausalShape;
    const int first = slab * kChunk;
    if constexpr (kTransposed) {
      copy_tile<Shape::kDim, kChunk, Shape::kThreads>(to, at + first, dim_v, 0, dim_v - first,
                                                      [&](int row) { return row < dim; });
    } else {
      copy_tile<kChunk, Shape::kDim, Shape::kThreads>(to, at, dim_v, first, dim_v,
                                                      [&](int row) { return row < dim; });
    }
  }
};

// 32 tokens and their 16 partners, as bf16. `kUpTo`: partners are at most as late as the tokens;
// otherwise at least.
template <bool kUpTo>
__device__ inline void write_wide_pairs(unsigned char* tile, float (&x)[2][2][4], int first,
                                        int partner, bool diagonal) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int band = i / 4, half = i / 2 % 2, n = i % 2;
    const int row = first + 16 * band + g + 8 * half, column = partner + 8 * n + 2 * t;
    float* const pair = x[band][n] + 2 * half;
    if (diagonal) {
      if (kUpTo ? column > row : column < row) pair[0] = 0;
      if (kUpTo ? column + 1 > row : column + 1 < row) pair[1] = 0;
    }
    *reinterpret_cast<std::uint32_t*>(tile + tile_offset<kChunk>(row, column / 8) + 4 * t) =
        pack<Bf16>(pair[0], pair[1]);
  }
}

// Starts copying what a block meets next: slabs of the matrix, two tiles for each partner, the
// last.
template <class Parts>
__device__ inline void start_wide_tile(const Parts& parts, const WideCausalMatrix& matrix,
                                       unsigned char* tile, int item, int slabs) {
  const int behind = item - slabs;
  if (behind < 0) {
    matrix.copy<Parts::kTransposed>(tile, item);
  } else if (behind == 2 * parts.partners) {
    parts.copy_last(tile);
  } else if (behind % 2 == 0) {
    parts.copy_first(tile, behind / 2);
  } else {
    parts.copy_second(tile, behind / 2);
  }
}

// All products of a block. What a block does with its tokens is in `parts`:
//   Parts::kTransposed, kUpTo, kLast   x M^T instead of x M; masks; one tile more at the end
//   partners, columns, depth           tiles y and z; of the results; columns of x and y
//   copy_own, copy_first, copy_second, copy_last       start copies of x, y, z, of the last tile
//   arrived_own, ...                   elementwise work of a thread on what it copied itself
//   pairs, diagonal, pairs_written     x y^T before it is rounded; is it masked; after that
// One barrier a tile: while one is multiplied with, the next is on its way to the other stage.
template <class Parts>
__device__ inline void multiply_wide_causal(Parts& parts, const WideCausalMatrix& matrix,
                                            WideCausalShared& shared, WideCausalSums& acc) {
  using Shape = WideCausalShape;
  constexpr bool kTransposed = Parts::kTransposed;
  const WideCausalWarp warp;
  const int slabs = matrix.slabs<kTransposed>();
  const int items = slabs + 2 * parts.partners + (Parts::kLast ? 1 : 0);
  const auto start = [&](int item) {
    if (item < items) start_wide_tile(parts, matrix, shared.stages[item & 1], item, slabs);
    copy_commit();
  };
  const auto meet_others = [&](int item) {
    __syncthreads();
    start(item + 1);
  };
  const bool has_columns = warp.column() < parts.columns;
  parts.copy_own(shared.own);
  start(0);
  copy_wait<0>();
  parts.arrived_own(shared.own);
  int item = 0;
  for (; item < slabs; ++item) {
    copy_wait<0>();
    meet_others(item);
    const unsigned char* const tile = shared.stages[item & 1];
    if (!has_columns) continue;
    if constexpr (kTransposed) {
      multiply_wide_rows<kChunk>(acc, shared.own, warp.first, item * kChunk / 16, tile,
                                 warp.column(), kChunk / 16);
    } else {
      multiply_wide_tiles<Shape::kDim>(acc, shared.own, warp.first, item * kChunk / 16, tile,
                                       warp.column(), kChunk / 16);
    }
  }
  const int steps = (parts.depth + 15) / 16;
  for (int partner = 0; partner < parts.partners; ++partner) {
    unsigned char* tile = shared.stages[item & 1];
    copy_wait<0>();
    parts.arrived_first(tile, partner);
    meet_others(item++);
    const int column = Shape::kPairs * warp.group;
    float x[2][2][4] = {};
    multiply_wide_rows<Shape::kDim>(x, shared.own, warp.first, 0, tile, column, steps);
    parts.pairs(x, partner, column);
    write_wide_pairs<Parts::kUpTo>(shared.pairs, x, warp.first, column, parts.diagonal(partner));
    tile = shared.stages[item & 1];
    copy_wait<0>();
    parts.arrived_second(tile, partner);
    meet_others(item++);
    parts.pairs_written(shared.pairs, warp.first);
    if (has_columns) {
      multiply_wide_tiles<kChunk>(acc, shared.pairs, warp.first, 0, tile, warp.column(),
                                  kChunk / 16);
    }
  }
  if constexpr (Parts::kLast) {
    copy_wait<0>();
    parts.arrived_last(shared.stages[item & 1]);
    __syncthreads();
  }
}

}  // namespace lln::cuda
