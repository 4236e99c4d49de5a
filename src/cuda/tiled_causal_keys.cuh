// The second backward walk of causal LLN and LLN+Diag, from the last chunk of a piece to the first:
// dk and dv. With Y = Ea / mass of rows, G = sum Y (x) g and T = sum Y delta over all rows behind
// the chunk,
//   dv = triu(Eu Y^T) g + Eu G,   dk = beta Eu (triu(v g^T - delta) Y + v G^T - T).
// Sums over rows go over all query heads of a group, head by head in every chunk.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_causal_chunks.cuh"
#include "cuda/tiled_causal_diag.cuh"

namespace lln::cuda {

template <int kDim>
struct CausalKeysShape : CausalShape<kDim> {
  using Base = CausalShape<kDim>;
  static constexpr int kStages = 2;
  static constexpr int kStatistics = 5;  // 1 / mass, delta; Diag: log2 of the mass, delta, weight
  static constexpr int kStageBytes = 4 * Base::kTileBytes + kStatistics * kChunk * 4;
  // Y, G, T.
  static constexpr int kShared =
      kStages * kStageBytes + Base::kTileBytes + Base::kStateBytes + kDim * 4;
};

// The upper triangle, key <= row, of 16 keys and the same 16 rows.
__device__ inline void mask_rows_before(float (&x)[2][4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (8 * n + 2 * t + (i & 1) < g + 8 * (i >> 1)) x[n][i] = 0;
    }
  }
}

// Y of a tile of queries: Ea rounded as the other walks have it, times 1 / mass.
template <int kDim>
__device__ inline void write_row_weights(unsigned char* to, const unsigned char* q_tile,
                                         const float* inverse, float scale, int dim) {
  constexpr int kPieces = kDim / 8, kStep = CausalShape<kDim>::kThreads / kPieces;
  const int first = static_cast<int>(threadIdx.x) / kPieces;
  const int piece = static_cast<int>(threadIdx.x) % kPieces;
#pragma unroll
  for (int i = 0; i < kChunk / kStep; ++i) {
    const int row = first + i * kStep;
    const std::uint32_t at = tile_offset<kDim>(row, piece);
    const uint4 x = *reinterpret_cast<const uint4*>(q_tile + at);
    const float factor = 8 * piece < dim ? inverse[row] : 0;
    const auto weight = [&](std::uint32_t word) {
      const float2 e = unpack<Bf16>(exponentials(word, scale));
      return pack<Bf16>(e.x * factor, e.y * factor);
    };
    *reinterpret_cast<uint4*>(to + at) = {weight(x.x), weight(x.y), weight(x.z), weight(x.w)};
  }
}

// 16 keys become Eu; zeros where they do not count.
template <int kDim>
__device__ inline void load_key_exponentials(RowOperand<kDim>& eu, const unsigned char* k_tile,
                                             int first, float scale, std::uint64_t valid) {
  const int g = (threadIdx.x & 31) >> 2;
  load_left<kDim>(eu, k_tile, first);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool counts = ((valid >> (first + g + 8 * (i & 1))) & 1) != 0;
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      eu[step][i] = counts ? exponentials(eu[step][i], scale) : 0;
    }
  }
}

// What 16 keys get from the rows of the chunk, du over Eu at 64 channels and dv at 64 columns.
template <int kDim>
__device__ inline void add_own_rows(float (&du)[8][4], float (&dv)[8][4],
                                    const RowOperand<kDim>& eu, int first, int column,
                                    const unsigned char* y_tile, const unsigned char* v_tile,
                                    const unsigned char* g_tile, const float* delta) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int row = 0; row < kChunk; row += 16) {
    if (row < first) continue;
    float p[2][4] = {}, products[2][4] = {};
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      std::uint32_t v[4];
      load_left<kDim>(v, v_tile, first, step);
      multiply_by_tile_rows<kDim>(p, eu[step], y_tile, row, step);
      multiply_by_tile_rows<kDim>(products, v, g_tile, row, step);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 delta_of = *reinterpret_cast<const float2*>(delta + row + 8 * n + 2 * t);
      take_delta(products[n][0], products[n][1], delta_of);
      take_delta(products[n][2], products[n][3], delta_of);
    }
    if (row == first) {
      mask_rows_before(p);
      mask_rows_before(products);
    }
    std::uint32_t y[4];
    pack_left(y, p);
    multiply_by_tile<kDim>(dv, y, g_tile, row, column);
    pack_left(y, products);
    multiply_by_tile<kDim>(du, y, y_tile, row, column);
  }
}

// Statistics of the rows of a chunk, [kStatistics, kChunk].
template <int kDim, bool kDiag>
__device__ inline void copy_statistics(unsigned char* to, const CausalCall& causal,
                                       const CausalPiece& piece, int first) {
  constexpr int kArrays = kDiag ? CausalKeysShape<kDim>::kStatistics : 2;
  const std::int64_t at = statistics_at(causal, piece, piece.head) + first;
  for (int i = static_cast<int>(threadIdx.x); i < kArrays * kChunk;
       i += CausalShape<kDim>::kThreads) {
    const int array = i / kChunk, row = i % kChunk;
    const float* const from = array == 0   ? causal.inverse
                              : array == 1 ? causal.delta
                              : array == 2 ? causal.diag_mass
                              : array == 3 ? causal.diag_delta
                                           : causal.diag_weight;
    const bool there = first + row < piece.count;
    copy_word_async(shared_address(to) + 4 * i, there ? from + at + row : from, there);
  }
}

// One block per piece and key head.
template <int kDim, bool kDiag>
__global__ void __launch_bounds__(2 * kDim, kDim <= 64 ? 2 : 1)
    causal_keys(const __grid_constant__ CausalCall causal) {
  using Shape = CausalKeysShape<kDim>;
  LLN_DYNAMIC_SHARED(shared);
  unsigned char* const y_tile = shared + Shape::kStages * Shape::kStageBytes;
  unsigned char* const sum_tile = y_tile + Shape::kTileBytes;
  float* const sum_mass = reinterpret_cast<float*>(sum_tile + Shape::kStateBytes);
  const DeviceCall& call = causal.call;
  const CausalPiece piece = find_causal_piece<true>(call);
  if (piece.s < 0) return;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const int warp = warp_index(), lane = threadIdx.x & 31, t = lane & 3;
  const int first = 16 * (warp & 3), column = 64 * (warp >> 2);  // of this warp
  const int group = static_cast<int>(static_cast<std::uint32_t>(call.heads) /
                                     static_cast<std::uint32_t>(call.heads_k));
  const KeyChunks<kDim> keys(call, piece);
  Bf16* const dk = piece.keys<Bf16>(call.dk);
  Bf16* const dv = piece.keys<Bf16>(call.dv);
  const int chunks = (piece.count + kChunk - 1) / kChunk;
  // Chunks from the last to the first, and the heads of the group in each.
  int next_chunk = chunks - 1, next_head = 0, next_stage = 0;
  const auto start_next = [&] {
    if (next_chunk >= 0) {
      unsigned char* const stage = shared + next_stage * Shape::kStageBytes;
      const int at = next_chunk * kChunk;
      CausalPiece rows = piece;
      rows.head = piece.head + next_head;
      keys.copy(stage + Shape::kTileBytes, stage + 2 * Shape::kTileBytes, at);
      copy_chunk<kDim>(stage, rows.rows<const Bf16>(call.q), call.q.token, at, piece.count, dim);
      copy_chunk<kDim>(stage + 3 * Shape::kTileBytes, rows.rows<const Bf16>(call.g), call.g.token,
                       at, piece.count, dim_v);
      copy_statistics<kDim, kDiag>(stage + 4 * Shape::kTileBytes, causal, rows, at);
      next_stage = next_stage + 1 == Shape::kStages ? 0 : next_stage + 1;
      if (++next_head == group) {
        next_head = 0;
        --next_chunk;
      }
    }
    copy_commit();
  };
  for (int i = 0; i < Shape::kStages - 1; ++i) start_next();
  if (piece.first) {
    zero_rows_before(dk, call.dk.token, piece.sequence.key_first, dim);
    zero_rows_before(dv, call.dv.token, piece.sequence.key_first, dim_v);
  }
  ChannelRows<kDim> sums;
  if (!piece.last) {
    sums.read(causal.behind, (piece.slot + 1) * call.heads + piece.head, dim, dim_v);
    sums.mass[1] = sums.mass[3] = 0;
  }
  const float beta = scale_at(call.beta, piece.s, piece.head_k);
  const float diag_scale = kLog2E * rsqrtf(static_cast<float>(call.channels));
  Largest largest;
  int stage_index = 0;
  for (int chunk = chunks - 1; chunk >= 0; --chunk) {
    const std::uint64_t valid = keys.valid(chunk * kChunk);
    float du[8][4] = {}, dv_acc[8][4] = {};
    float diag[kDiag ? 8 : 1][4] = {};
    RowOperand<kDim> eu;
    for (int head = 0; head < group; ++head) {
      copy_wait<Shape::kStages - 2>();
      __syncthreads();
      start_next();
      unsigned char* const stage = shared + stage_index * Shape::kStageBytes;
      unsigned char* const k_tile = stage + Shape::kTileBytes;
      unsigned char* const v_tile = k_tile + Shape::kTileBytes;
      const unsigned char* const g_tile = v_tile + Shape::kTileBytes;
      const float* const statistics = reinterpret_cast<const float*>(g_tile + Shape::kTileBytes);
      stage_index = stage_index + 1 == Shape::kStages ? 0 : stage_index + 1;
      if (keys.masked(valid)) clear_masked<kDim>(k_tile, v_tile, valid);
      write_row_weights<kDim>(y_tile, stage, statistics,
                              scale_at(call.alpha, piece.s, piece.head + head) * kLog2E, dim);
      if (head == 0) {
        sums.write_tile(sum_tile);
        if (t == 0) {
          sum_mass[sums.channel(0)] = sums.mass[0] + sums.mass[1];
          sum_mass[sums.channel(1)] = sums.mass[2] + sums.mass[3];
        }
        load_key_exponentials<kDim>(eu, k_tile, first, beta * kLog2E, valid);
        if (call.channels < dim) clear_row_padding<kDim>(eu, call.channels);
      }
      __syncthreads();
      if (head == 0) {
#pragma unroll
        for (int step = 0; step < kDim / 16; ++step) {
          std::uint32_t v[4];
          load_left<kDim>(v, v_tile, first, step);
          multiply_by_tile_rows<kDim>(du, v, sum_tile, column, step);
          multiply_by_tile<kDim>(dv_acc, eu[step], sum_tile, 16 * step, column);
        }
      }
      add_own_rows<kDim>(du, dv_acc, eu, first, column, y_tile, v_tile, g_tile,
                         statistics + kChunk);
      if constexpr (kDiag) {
        diag_key_gradients<kDim>(
            diag, dv_acc, stage, first, column, valid, causal.diag_log2, diag_scale,
            {statistics + 2 * kChunk, statistics + 3 * kChunk, statistics + 4 * kChunk});
      }
      add_chunk<kDim>(sums, y_tile, g_tile, statistics + kChunk);
    }
    const int row = chunk * kChunk + first;
    store_natural(dv, call.dv.token, row, piece.count, column, dim_v, dv_acc, largest);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 taken = *reinterpret_cast<const float2*>(sum_mass + column + 8 * n + 2 * t);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* const own = du[n] + 2 * half;
        const int word = 2 * (n & 1) + half;
        const bool lower = kDim == 64 || column == 0;
        const float2 e = unpack<Bf16>(lower ? eu[n / 2][word] : eu[kDim / 16 - 4 + n / 2][word]);
        own[0] = beta * e.x * (own[0] - taken.x);
        own[1] = beta * e.y * (own[1] - taken.y);
        if constexpr (kDiag) {
          own[0] += diag[n][2 * half];
          own[1] += diag[n][2 * half + 1];
        }
      }
    }
    store_natural(dk, call.dk.token, row, piece.count, column, dim, du, largest);
  }
  report_reach(causal, piece, largest.at_most(kLargestBf16));
}

}  // namespace lln::cuda
