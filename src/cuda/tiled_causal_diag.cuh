// The block-diagonal part of causal attention. Blocks are powers of two up to a chunk and are
// counted from the first valid key, as chunks are, so that a chunk holds whole blocks.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_causal_tiles.cuh"
#include "cuda/tiled_rows_backward.cuh"

namespace lln::cuda {

// Which keys of a chunk the 16 rows from `first` on see in their blocks.
struct DiagSpan {
  int log2;  // of the block
  std::uint64_t valid;

  // Whether any of 16 rows from `row` on sees any of 16 keys from `key` on.
  __device__ bool meets(int row, int key) const {
    return key <= row && (log2 <= 4 ? key == row : key >> log2 == row >> log2);
  }
  __device__ bool sees(int row, int key) const {
    return key <= row && key >> log2 == row >> log2 && ((valid >> key) & 1) != 0;
  }
};

// Scores of 16 rows in `x` with 16 keys, in units of log2; -inf where they do not meet.
template <int kDim>
__device__ inline void diag_scores(float (&scores)[2][4], const RowOperand<kDim>& x, int first,
                                   int key, const unsigned char* k_tile, const DiagSpan& span,
                                   float scale) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  clear(scores);
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    multiply_by_tile_rows<kDim>(scores, x[step], k_tile, key, step);
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool sees = span.sees(first + g + 8 * (i >> 1), key + 8 * n + 2 * t + (i & 1));
      scores[n][i] = sees ? scores[n][i] * scale : -INFINITY;
    }
  }
}

// Diag of 16 rows of a chunk.
template <int kDim, int kCount>
__device__ inline void diag_rows(float (&acc)[kCount][4], const RowOperand<kDim>& x, int first,
                                 int column, const unsigned char* k_tile,
                                 const unsigned char* v_tile, std::uint64_t valid, int log2,
                                 float scale) {
  const DiagSpan span{log2, valid};
  const std::uint32_t ones = pack<Bf16>(1, 1);
  float scores[kChunk / 16][2][4];
  float top[2] = {-INFINITY, -INFINITY};
#pragma unroll
  for (int part = 0; part < kChunk / 16; ++part) {
    if (!span.meets(first, 16 * part)) continue;
    diag_scores<kDim>(scores[part], x, first, 16 * part, k_tile, span, scale);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      top[(i >> 1) & 1] = fmaxf(top[(i >> 1) & 1], scores[part][i >> 2][i & 3]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    top[half] = quad_max(top[half]);
    if (top[half] == -INFINITY) top[half] = 0;
  }
  float mass[4] = {};
#pragma unroll
  for (int part = 0; part < kChunk / 16; ++part) {
    if (!span.meets(first, 16 * part)) continue;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& score = scores[part][i >> 2][i & 3];
      score = exp2_fast(score - top[(i >> 1) & 1]);
    }
    std::uint32_t y[4];
    pack_left(y, scores[part]);
    mma(mass, y, ones, ones);
    multiply_by_tile<kDim>(acc, y, v_tile, 16 * part, column);
  }
  const float inverse[2] = {mass[0] == 0 ? 0 : 1 / mass[0], mass[2] == 0 ? 0 : 1 / mass[2]};
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[n][i] *= inverse[i >> 1];
  }
}

// Weights of the two parts: by rows, or by channels, in which case the rows' are 1.
struct CausalWeights {
  const DeviceCall& call;
  std::int64_t head;
  RowFactor lln, diag;
  float diag_scale;  // log2(e) / sqrt(dim)

  __device__ CausalWeights(const DeviceCall& of, const CausalPiece& piece)
      : call(of),
        head(piece.head),
        lln(row_factor(of.lln_weight, piece.sequence, piece.head)),
        diag(row_factor(of.diag_weight, piece.sequence, piece.head)),
        diag_scale(kLog2E * rsqrtf(static_cast<float>(of.dim))) {}

  // acc = w1 acc / mass + w2 part, for rows `row` + g and + 8 of the piece.
  template <int kCount>
  __device__ void join(float (&acc)[kCount][4], const float (&part)[kCount][4],
                       const float (&mass)[4], const CausalPiece& piece, int row,
                       int column) const {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
    float w1[2], w2[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const std::int64_t at = piece.begin + min(row + g + 8 * half, piece.count - 1);
      w1[half] = mass[2 * half] == 0 ? 0 : lln(at) / mass[2 * half];
      w2[half] = diag(at);
    }
    const bool by_channel = call.lln_weight.channel != 0 || call.diag_weight.channel != 0;
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        float x = w1[i >> 1] * acc[n][i], y = w2[i >> 1] * part[n][i];
        const int c = column + 8 * n + 2 * t + (i & 1);
        if (by_channel && c < call.dim_v) {
          x *= channel_factor(call.lln_weight, head, c);
          y *= channel_factor(call.diag_weight, head, c);
        }
        acc[n][i] = x + y;
      }
    }
  }
};

}  // namespace lln::cuda
