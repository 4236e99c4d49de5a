// The forward pass of Diag in f32, with products of split_mma.cuh. A block of Diag has at most 64
// tokens, so that a tile of 64 holds whole blocks: its rows see keys of the same tile and no
// others. Of LLN+Diag the LLN part has been written before, and Diag is added to it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/split_tiles.cuh"
#include "cuda/tiled_diag_walk.cuh"
#include "cuda/tiled_rows_backward.cuh"

namespace lln::cuda {

// Tokens of one sequence, rows and keys alike, that are whole blocks.
struct FloatDiagTile {
  std::int64_t begin;   // in the sequence
  int count;            // the tokens after them in a tile of 64 belong to other tiles
  int block;            // tokens of a block
  bool causal;          // rows see no keys behind them
  std::uint64_t valid;  // bit j: whether key j counts

  __device__ bool key(int j) const { return ((valid >> j) & 1) != 0; }
  // Bit j: whether a row sees key j.
  __device__ std::uint64_t seen(int row) const {
    if (row >= count) return 0;
    const std::uint64_t before = causal ? low_bits(row + 1) : ~std::uint64_t{0};
    return valid & before & low_bits(block) << row / block * block;
  }
  // Which 16 keys the 16 rows from `first` on may see, or which rows these keys: those of others
  // add nothing to a product.
  __device__ bool meets(int first, int step) const {
    return 16 * step + 15 >= first / block * block &&
           16 * step < ((first + 15) / block + 1) * block;
  }
};

// The tiles of a sequence. They begin where blocks do, counted from the first valid key; tokens
// before that key which do not fill a tile are one of their own.
struct FloatDiagWalk {
  const Sequences& all;
  const DeviceSequence& sequence;
  int block, tile;
  bool causal;
  std::int64_t lead;  // tokens of the first tile where it is not a whole one

  __device__ FloatDiagWalk(const TiledCall& tiled, const DeviceSequence& own)
      : all(tiled.call.sequences),
        sequence(own),
        block(static_cast<int>(tiled.call.diag_block)),
        tile(kDiagTile / block * block),
        causal(tiled.causal),
        lead(own.key_first % tile) {}

  // The first tile that begins at `token` or later.
  __device__ std::int64_t first(std::int64_t token) const {
    if (token == 0) return 0;
    return token <= lead ? lead : lead + (token - lead + tile - 1) / tile * tile;
  }
  __device__ std::int64_t next(std::int64_t begin) const {
    return begin == 0 && lead > 0 ? lead : begin + tile;
  }
  __device__ FloatDiagTile at(std::int64_t begin) const {
    const std::int64_t end = min(next(begin), sequence.k_tokens);
    return {begin, static_cast<int>(end - begin), block, causal,
            valid_keys(all, sequence, begin, min(end, sequence.key_end))};
  }
};

// Rows 16 i .. + 15 of a tile and 32 of its channels, one after the other for each warp of a block.
template <int kDim, class Body>
__device__ inline void for_each_slice(Body&& body) {
  const int warps = static_cast<int>(blockDim.x) / 32;
  for (int i = static_cast<int>(threadIdx.x) / 32; i < kDiagTile / 16 * (kDim / 32); i += warps) {
    body(i % 4 * 16, i / 4);
  }
}

// Columns of results in natural order, from `column` on. `add`: to what is there.
template <int kCount>
__device__ inline void put_float_rows(float* rows, std::int64_t stride, int first, int end,
                                      int column, int dim, const float (&acc)[kCount][4],
                                      bool add) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + (lane >> 2) + 8 * half;
    if (row >= end) continue;
    float* const to = rows + row * stride + column + 2 * (lane & 3);
    float2 sums[kCount];  // all are under way before the first is written
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      sums[n] = {0, 0};
      if (add && column + 8 * n < dim) sums[n] = *reinterpret_cast<const float2*>(to + 8 * n);
    }
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      if (column + 8 * n >= dim) continue;
      *reinterpret_cast<float2*>(to + 8 * n) = {sums[n].x + acc[n][2 * half],
                                                sums[n].y + acc[n][2 * half + 1]};
    }
  }
}

// 16 rows as they are left operands, channels in natural order.
template <int kDim>
__device__ inline void load_left_rows(float2 (&x)[kDim / 16][4], const float* rows,
                                      std::int64_t stride, int first, int end, int dim) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < kDim / 4; ++i) {
    const int row = first + (lane >> 2) + 8 * (i % 2);
    const int channel = i / 4 * 16 + i / 2 % 2 * 8 + 2 * (lane & 3);
    x[i / 4][i % 4] = {0, 0};
    if (row < end && channel < dim) {
      x[i / 4][i % 4] = *reinterpret_cast<const float2*>(rows + row * stride + channel);
    }
  }
}

// Scores of 16 rows become their weights times `factor`: the softmax over a tile's 64 keys.
__device__ inline void soften(float (&scores)[kDiagTile / 8][4], float scale,
                              const float (&factor)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = kNoExponent, mass = 0;
#pragma unroll
    for (int i = 0; i < kDiagTile / 4; ++i) top = fmaxf(top, scores[i / 2][2 * half + i % 2]);
    top = quad_max(top);
#pragma unroll
    for (int i = 0; i < kDiagTile / 4; ++i) {
      float& x = scores[i / 2][2 * half + i % 2];
      x = exp2_fast((x - top) * scale);
      mass += x;
    }
    const float times = inverse_of(quad_sum(mass)) * factor[half];
#pragma unroll
    for (int i = 0; i < kDiagTile / 4; ++i) scores[i / 2][2 * half + i % 2] *= times;
  }
}

// 16 rows of a tile of keys and values in shared memory.
template <int kDim>
__device__ inline void float_diag_rows(float (&acc)[kDim / 8][4], const FloatDiagTile& tile,
                                       const float2 (&q)[kDim / 16][4], int first,
                                       const unsigned char* k_tile, const unsigned char* v_tile,
                                       float scale, const float (&factor)[2]) {
  const int row = first + (static_cast<int>(threadIdx.x) & 31) / 4;
  float scores[kDiagTile / 8][4] = {};
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    Split a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = split(q[step][i].x, q[step][i].y);
    multiply_split_step<kDim, true, kDiagTile>(scores, a, k_tile, step, 0);
  }
  const std::uint64_t seen[2] = {tile.seen(row), tile.seen(row + 8)};
  mask_scores(scores, seen);
  soften(scores, scale, factor);
#pragma unroll
  for (int step = 0; step < kDiagTile / 16; ++step) {
    if (!tile.meets(first, step)) continue;
    Split a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const pair = scores[2 * step + i / 2] + 2 * (i % 2);
      a[i] = split(pair[0], pair[1]);
    }
    multiply_split_step<kDim, false, kDiagTile>(acc, a, v_tile, step, 0);
  }
}

template <int kDim>
inline constexpr int kFloatDiagShared = 2 * kSplitBytes<kDiagTile, kDim>;  // k and v

// One block per row job and query head: the tiles that begin in it.
template <int kDim>
__global__ void __launch_bounds__(kDiagThreads, kDim <= 64 ? 3 : 2)
    float_diag_forward(const __grid_constant__ TiledCall tiled) {
  constexpr int kTileBytes = kSplitBytes<kDiagTile, kDim>;
  LLN_DYNAMIC_SHARED(shared);
  unsigned char* const v_tile = shared + kTileBytes;
  const DeviceCall& call = tiled.call;
  const RowPiece piece = find_rows(call, blockIdx.x);
  if (piece.s < 0) return;
  const FloatDiagWalk walk(tiled, piece.sequence);
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const int first = 16 * (static_cast<int>(threadIdx.x) / 32);
  const float scale = kLog2E / sqrtf(static_cast<float>(call.channels));
  const RowFactor factor = row_factor(call.diag_weight, piece.sequence, piece.head);
  RowPiece keys = piece;
  keys.sequence.q_begin = piece.sequence.k_begin;
  keys.head = piece.head_k;
  wait_for_previous();
  let_next_start();
  const std::int64_t end = piece.begin + piece.count;
  for (std::int64_t begin = walk.first(piece.begin); begin < end; begin = walk.next(begin)) {
    const FloatDiagTile tile = walk.at(begin);
    const std::int64_t away = begin - piece.begin;
    const float* const k = keys.rows<float>(call.k) + away * call.k.token;
    const float* const v = keys.rows<float>(call.v) + away * call.v.token;
    __syncthreads();  // the tile before has been read
    for_each_slice<kDim>([&](int rows, int slice) {
      const auto valid = [&](int j) { return tile.key(j); };
      RowFloats<32> x, y;
      load_float_rows_if<32>(x, k + 32 * slice, call.k.token, rows, dim - 32 * slice, valid);
      load_float_rows_if<32>(y, v + 32 * slice, call.v.token, rows, dim_v - 32 * slice, valid);
      write_split_rows<kDiagTile, kDim>(shared, rows, slice, x);
      write_split_rows<kDiagTile, kDim>(v_tile, rows, slice, y);
    });
    float2 q[kDim / 16][4];
    load_left_rows<kDim>(q, piece.rows<float>(call.q) + away * call.q.token, call.q.token, first,
                         tile.count, dim);
    __syncthreads();
    if (first >= tile.count) continue;
    const int lane = threadIdx.x & 31, last = tile.count - 1;
    const float factors[2] = {factor(begin + min(first + (lane >> 2), last)),
                              factor(begin + min(first + (lane >> 2) + 8, last))};
    float acc[kDim / 8][4] = {};
    float_diag_rows<kDim>(acc, tile, q, first, shared, v_tile, scale, factors);
    if (call.diag_weight.channel != 0) {
#pragma unroll
      for (int i = 0; i < kDim / 4; ++i) {
        const int column = i / 2 * 8 + 2 * (lane & 3) + i % 2;
        const float times =
            column < dim_v ? channel_factor(call.diag_weight, piece.head, column) : 0;
        acc[i / 2][i % 2] *= times;
        acc[i / 2][2 + i % 2] *= times;
      }
    }
    put_float_rows(piece.rows<float>(call.o) + away * call.o.token, call.o.token, first, tile.count,
                   0, dim_v, acc, tiled.adds);
  }
}

}  // namespace lln::cuda
