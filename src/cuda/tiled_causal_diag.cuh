// The block-diagonal part of causal attention. Blocks are powers of two up to a chunk and are
// counted from the first valid key, as chunks are, so that a chunk holds whole blocks.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_causal_tiles.cuh"
#include "cuda/tiled_rows_backward.cuh"

namespace lln::cuda {

// Which rows and keys of a chunk meet in a block. Masks have a bit for each of 16 neighbours from
// column 2 t of a lane on, so that results (n, i) ask for bit 8 n + (i & 1).
struct DiagSpan {
  int log2;  // of the block
  std::uint64_t valid;

  // Whether any of 16 rows from `row` on sees any of 16 keys from `key` on.
  __device__ bool meets(int row, int key) const {
    return key <= row && (log2 <= 4 ? key == row : key >> log2 == row >> log2);
  }
  // Of the keys from `key` on that `row` sees; the two meet.
  __device__ std::uint32_t keys(int row, int key) const {
    const int own = row - key;  // 16 and more: a later part
    std::uint32_t mask = static_cast<std::uint32_t>(valid >> key) & 0xFFFFU;
    if (own < 16) mask &= (2U << own) - 1;
    if (log2 < 4) mask &= ~0U << (own >> log2 << log2);
    return mask >> (2 * (threadIdx.x & 3));
  }
  // Of the rows from `row` on that see `key`.
  __device__ std::uint32_t rows(int row, int key) const {
    const int own = key - row;  // negative: an earlier part
    std::uint32_t mask = ((valid >> key) & 1) != 0 ? 0xFFFFU : 0;
    if (own > 0) mask &= ~0U << own;
    if (log2 < 4) mask &= (1U << (((own >> log2) + 1) << log2)) - 1;
    return mask >> (2 * (threadIdx.x & 3));
  }
};

// Scores of 16 rows in `x` with 16 keys, in units of log2; -inf where they do not meet.
template <int kDim>
__device__ inline void diag_scores(float (&scores)[2][4], const RowOperand<kDim>& x, int first,
                                   int key, const unsigned char* k_tile, const DiagSpan& span,
                                   float scale) {
  const int g = (threadIdx.x & 31) >> 2;
  clear(scores);
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    multiply_by_tile_rows<kDim>(scores, x[step], k_tile, key, step);
  }
  const std::uint32_t seen[2] = {span.keys(first + g, key), span.keys(first + g + 8, key)};
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const bool sees = (seen[i >> 1] >> (8 * n + (i & 1)) & 1) != 0;
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
        diag_scale(kLog2E * rsqrtf(static_cast<float>(of.channels))) {}

  // Of row `row` + g, or of that + 8, of the piece.
  __device__ float lln_at(const CausalPiece& piece, int row, int half) const {
    return lln(row_at(piece, row, half));
  }
  __device__ float diag_at(const CausalPiece& piece, int row, int half) const {
    return diag(row_at(piece, row, half));
  }

  __device__ bool by_channel() const {
    return call.lln_weight.channel != 0 || call.diag_weight.channel != 0;
  }
  // Factors of channels into shared memory, [LLN, Diag][kDim].
  template <int kDim>
  __device__ void write_channels(float* channels) const {
    for (int i = static_cast<int>(threadIdx.x); i < 2 * kDim; i += static_cast<int>(blockDim.x)) {
      const Weight& weight = i < kDim ? call.lln_weight : call.diag_weight;
      channels[i] = i % kDim < call.dim_v ? channel_factor(weight, head, i % kDim) : 0;
    }
  }

  // acc = w1 acc / mass + w2 part, for rows `row` + g and + 8 of the piece. `channels` are those of
  // the first column.
  template <int kDim, int kCount>
  __device__ void join(float (&acc)[kCount][4], float (&part)[kCount][4], const float (&mass)[4],
                       const CausalPiece& piece, int row, const float* channels) const {
    const int t = threadIdx.x & 3;
    float w1[2], w2[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      w1[half] = mass[2 * half] == 0 ? 0 : lln_at(piece, row, half) / mass[2 * half];
      w2[half] = diag_at(piece, row, half);
    }
    if (by_channel()) {
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
        const float2 x = *reinterpret_cast<const float2*>(channels + 8 * n + 2 * t);
        const float2 y = *reinterpret_cast<const float2*>(channels + kDim + 8 * n + 2 * t);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          acc[n][2 * half] *= x.x;
          acc[n][2 * half + 1] *= x.y;
          part[n][2 * half] *= y.x;
          part[n][2 * half + 1] *= y.y;
        }
      }
    }
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        acc[n][i] = fmaf(w1[i >> 1], acc[n][i], w2[i >> 1] * part[n][i]);
      }
    }
  }

 private:
  __device__ static std::int64_t row_at(const CausalPiece& piece, int row, int half) {
    const int lane = threadIdx.x & 31;
    return piece.begin + min(row + (lane >> 2) + 8 * half, piece.count - 1);
  }
};

// Gradients of 16 rows, times w2, at 64 channels, in words of rows g and g + 8:
// P (g v^T - delta) k / sqrt(dim). Writes the rows'
// masses and deltas. `stage` has tiles of q, k, v and g.
template <int kDim>
__device__ inline void diag_row_gradients(std::uint32_t (&packed)[8][2], const unsigned char* stage,
                                          int first, int channel, std::uint64_t valid,
                                          const CausalCall& causal, const CausalWeights& weights,
                                          const CausalPiece& piece, int row,
                                          std::int64_t statistics) {
  constexpr int kTileBytes = kChunk * kDim * 2;
  const unsigned char* const k_tile = stage + kTileBytes;
  const unsigned char* const v_tile = k_tile + kTileBytes;
  const unsigned char* const g_tile = v_tile + kTileBytes;
  const int lane = threadIdx.x & 31, t = lane & 3;
  const DiagSpan span{causal.diag_log2, valid};
  float p[kChunk / 16][2][4];
  std::uint32_t products[kChunk / 16][4];  // packed: there are many registers in use
  float top[2] = {-INFINITY, -INFINITY}, mass[2] = {}, delta[2] = {};
  {
    RowOperand<kDim> q;
    load_left<kDim>(q, stage, first);
#pragma unroll
    for (int part = 0; part < kChunk / 16; ++part) {
      if (!span.meets(first, 16 * part)) continue;
      diag_scores<kDim>(p[part], q, first, 16 * part, k_tile, span, weights.diag_scale);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        top[(i >> 1) & 1] = fmaxf(top[(i >> 1) & 1], p[part][i >> 2][i & 3]);
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    top[half] = quad_max(top[half]);
    if (top[half] == -INFINITY) top[half] = 0;
  }
#pragma unroll
  for (int part = 0; part < kChunk / 16; ++part) {
    if (!span.meets(first, 16 * part)) continue;
    float dots[2][4] = {};
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      std::uint32_t g[4];
      load_left<kDim>(g, g_tile, first, step);
      multiply_by_tile_rows<kDim>(dots, g, v_tile, 16 * part, step);
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int half = (i >> 1) & 1;
      float& weight = p[part][i >> 2][i & 3];
      weight = exp2_fast(weight - top[half]);
      mass[half] += weight;
      delta[half] = fmaf(weight, dots[i >> 2][i & 3], delta[half]);
    }
    pack_left(products[part], dots);
  }
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float weight = weights.diag_at(piece, row, half);
    mass[half] = quad_sum(mass[half]);
    const float inverse = mass[half] == 0 ? 0 : 1 / mass[half];
    delta[half] = quad_sum(delta[half]) * inverse;
    factor[half] = inverse * weight * weights.diag_scale * kLn2;
    const int own = row + (lane >> 2) + 8 * half;
    if (channel == 0 && t == 0 && own < piece.count) {
      causal.diag_mass[statistics + own] =
          mass[half] == 0 ? INFINITY : top[half] + log2f(mass[half]);
      causal.diag_delta[statistics + own] = delta[half];
      causal.diag_weight[statistics + own] = weight;
    }
  }
  float acc[8][4] = {};
#pragma unroll
  for (int part = 0; part < kChunk / 16; ++part) {
    if (!span.meets(first, 16 * part)) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {  // words: rows g, g + 8, then the same 8 keys on
      const float2 dot = unpack<Bf16>(products[part][i]);
      float* const weight = p[part][i >> 1] + 2 * (i & 1);
      weight[0] *= (dot.x - delta[i & 1]) * factor[i & 1];
      weight[1] *= (dot.y - delta[i & 1]) * factor[i & 1];
    }
    std::uint32_t y[4];
    pack_left(y, p[part]);
    multiply_by_tile<kDim>(acc, y, k_tile, 16 * part, channel);
  }
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      packed[n][half] = pack<Bf16>(acc[n][2 * half], acc[n][2 * half + 1]);
    }
  }
}

// Statistics of a chunk's rows in the block-diagonal part.
struct DiagStatistics {
  const float *mass, *delta, *weight;  // [row]
};

// What 16 keys get from the rows of the chunk: dk at 64 channels, dv at 64 columns from `column`
// on.
template <int kDim>
__device__ inline void diag_key_gradients(float (&dk)[8][4], float (&dv)[8][4],
                                          const unsigned char* stage, int first, int column,
                                          std::uint64_t valid, int log2, float scale,
                                          const DiagStatistics& statistics) {
  constexpr int kTileBytes = kChunk * kDim * 2;
  const unsigned char* const k_tile = stage + kTileBytes;
  const unsigned char* const v_tile = k_tile + kTileBytes;
  const unsigned char* const g_tile = v_tile + kTileBytes;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const DiagSpan span{log2, valid};
#pragma unroll
  for (int part = 0; part < kChunk / 16; ++part) {
    const int row = 16 * part;
    if (!span.meets(row, first)) continue;
    float p[2][4] = {}, products[2][4] = {};
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      std::uint32_t x[4];
      load_left<kDim>(x, k_tile, first, step);
      multiply_by_tile_rows<kDim>(p, x, stage, row, step);
      load_left<kDim>(x, v_tile, first, step);
      multiply_by_tile_rows<kDim>(products, x, g_tile, row, step);
    }
    const std::uint32_t seen[2] = {span.rows(row, first + g), span.rows(row, first + g + 8)};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int at = row + 8 * n + 2 * t + (i & 1);
        const bool sees = (seen[i >> 1] >> (8 * n + (i & 1)) & 1) != 0;
        p[n][i] =
            sees ? exp2_fast(fmaf(p[n][i], scale, -statistics.mass[at])) * statistics.weight[at]
                 : 0;
        products[n][i] = p[n][i] * (products[n][i] - statistics.delta[at]) * (scale * kLn2);
      }
    }
    std::uint32_t y[4];
    pack_left(y, p);
    multiply_by_tile<kDim>(dv, y, g_tile, row, column);
    pack_left(y, products);
    multiply_by_tile<kDim>(dk, y, stage, row, column);
  }
}

}  // namespace lln::cuda
