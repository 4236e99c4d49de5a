// The second backward walk of causal LLN and LLN+Diag by warpgroup products, from the last chunk of
// a piece to the first: dk and dv. With Y = Ea / mass of rows, G = sum Y (x) g and T = sum Y delta
// over all rows behind the chunk,
//   dv = triu(Eu Y^T) g + Eu G,   dk = beta Eu (triu(v g^T - delta) Y + v G^T - T).
// Sums over rows go over all query heads of a group, head by head in every chunk.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sm90/causal_diag.cuh"
#include "cuda/tiled_causal_keys.cuh"

namespace lln::cuda::sm90 {

template <int kDim>
struct KeysShape : Shape<kDim> {
  using Base = Shape<kDim>;
  static constexpr int kStages = 2;
  static constexpr int kStatistics = CausalKeysShape<kDim>::kStatistics;
  static constexpr int kStatisticsBytes = kStatistics * kChunk * 4;
  static constexpr int kStageBytes = 4 * Base::kTileBytes;  // q, k, v, g
  static constexpr int kDeltaBytes = kChunk * 16;           // Narrow
  // Y, Eu, G, delta, T; statistics of each stage.
  static constexpr int kShared = kStages * (kStageBytes + kStatisticsBytes) + 2 * Base::kTileBytes +
                                 Base::kStateBytes + kDeltaBytes + kDim * 4;
};

// Y of a tile of queries: Ea rounded as the other walks have it, times 1 / mass.
template <int kDim>
__device__ inline void write_row_weights(unsigned char* to, const unsigned char* q_tile,
                                         const float* inverse, float scale, int dim) {
  const Pieces<kDim> own;
#pragma unroll
  for (int i = 0; i < own.kCount; ++i) {
    const uint4 x = *reinterpret_cast<const uint4*>(q_tile + own.at(i));
    const float factor = 8 * own.piece < dim ? inverse[own.row_at(i)] : 0;
    const auto weight = [&](std::uint32_t word) {
      const float2 e = unpack<Bf16>(exponentials(word, scale));
      return pack<Bf16>(e.x * factor, e.y * factor);
    };
    *reinterpret_cast<uint4*>(to + own.at(i)) = {weight(x.x), weight(x.y), weight(x.z),
                                                 weight(x.w)};
  }
}

// One block per piece and key head. kGrouped: several query heads have the same keys.
template <int kDim, bool kDiag, bool kGrouped>
__global__ void __launch_bounds__(2 * kDim, kDim == 64 ? 2 : 1)
    causal_keys(const __grid_constant__ CausalCall causal) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Sizes = KeysShape<kDim>;
  constexpr int kSteps = Sizes::kSteps;
  LLN_DYNAMIC_SHARED(shared);
  unsigned char* const y_tile = shared + Sizes::kStages * Sizes::kStageBytes;
  unsigned char* const eu_tile = y_tile + Sizes::kTileBytes;
  unsigned char* const sum_tile = eu_tile + Sizes::kTileBytes;
  unsigned char* const row_delta = sum_tile + Sizes::kStateBytes;
  float* const sum_mass = reinterpret_cast<float*>(row_delta + Sizes::kDeltaBytes);
  unsigned char* const all_statistics = reinterpret_cast<unsigned char*>(sum_mass + kDim);
  const DeviceCall& call = causal.call;
  const CausalPiece piece = find_causal_piece<true>(call);
  if (piece.s < 0) return;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const int warp = warp_index(), lane = threadIdx.x & 31, t = lane & 3;
  const int first = 16 * (warp & 3),
            panel = Sizes::kGroups == 1 ? 0 : warp >> 2;  // keys and channels of this warp
  const int group = kGrouped ? static_cast<int>(static_cast<std::uint32_t>(call.heads) /
                                                static_cast<std::uint32_t>(call.heads_k))
                             : 1;
  const KeyChunks<kDim> keys(call, piece);
  Bf16* const dk = piece.keys<Bf16>(call.dk);
  Bf16* const dv = piece.keys<Bf16>(call.dv);
  const int chunks = (piece.count + kChunk - 1) / kChunk;
  // Chunks from the last to the first, and the heads of the group in each.
  int next_chunk = chunks - 1, next_head = 0, next_stage = 0;
  const auto start_next = [&] {
    if (next_chunk >= 0) {
      unsigned char* const stage = shared + next_stage * Sizes::kStageBytes;
      const int at = next_chunk * kChunk;
      CausalPiece rows = piece;
      rows.head = piece.head + next_head;
      copy_chunk<kDim>(stage, rows.rows<const Bf16>(call.q), call.q.token, at, piece.count, dim);
      copy_chunk<kDim>(stage + Sizes::kTileBytes, keys.k, keys.k_stride, at, keys.count, dim);
      copy_chunk<kDim>(stage + 2 * Sizes::kTileBytes, keys.v, keys.v_stride, at, keys.count, dim_v);
      copy_chunk<kDim>(stage + 3 * Sizes::kTileBytes, rows.rows<const Bf16>(call.g), call.g.token,
                       at, piece.count, dim_v);
      copy_statistics<kDim, kDiag>(all_statistics + next_stage * Sizes::kStatisticsBytes, causal,
                                   rows, at);
      next_stage = next_stage + 1 == Sizes::kStages ? 0 : next_stage + 1;
      if (++next_head == group) {
        next_head = 0;
        --next_chunk;
      }
    }
    copy_commit();
  };
  for (int i = 0; i < Sizes::kStages - 1; ++i) start_next();
  if (piece.first) {
    zero_rows_before(dk, call.dk.token, piece.sequence.key_first, dim);
    zero_rows_before(dv, call.dv.token, piece.sequence.key_first, dim_v);
  }
  write_zeros<Sizes::kTeam>(row_delta, Sizes::kDeltaBytes);
  __syncthreads();
  ChannelRows<kDim> sums;
  if (!piece.last) {
    sums.read(causal.behind, (piece.slot + 1) * call.heads + piece.head, dim, dim_v);
    sums.mass[1] = sums.mass[3] = 0;
  }
  const float beta = scale_at(call.beta, piece.s, piece.head_k);
  const float diag_scale = kLog2E * rsqrtf(static_cast<float>(call.channels));
  Largest largest, seen;
  int stage_index = 0;
  const ByRows<kChunk> eu_rows(eu_tile, 0);
  const ByColumns<kChunk> y_channels(y_tile, 64 * panel);
  for (int chunk = chunks - 1; chunk >= 0; --chunk) {
    const std::uint64_t valid = keys.valid(chunk * kChunk);
    PairSums du, dv_acc, near;
    PairWords ds;
    const unsigned char* const near_queries = shared + stage_index * Sizes::kStageBytes;
    for (int head = 0; head < (kGrouped ? group : 1); ++head) {
      copy_wait<Sizes::kStages - 2>();
      show_products();
      __syncthreads();
      start_next();
      unsigned char* const q_tile = shared + stage_index * Sizes::kStageBytes;
      unsigned char* const k_tile = q_tile + Sizes::kTileBytes;
      unsigned char* const v_tile = k_tile + Sizes::kTileBytes;
      unsigned char* const g_tile = v_tile + Sizes::kTileBytes;
      const float* const statistics =
          reinterpret_cast<const float*>(all_statistics + stage_index * Sizes::kStatisticsBytes);
      stage_index = stage_index + 1 == Sizes::kStages ? 0 : stage_index + 1;
      if (keys.masked(valid)) {
        clear_masked<kDim>(k_tile, v_tile, valid);
        show_products();
        __syncthreads();
      }
      const ByRows<kChunk> v_rows(v_tile, 0);
      const ByColumns<kChunk> g_columns(g_tile, 64 * panel);
      if (head == 0) {
        write_state(sum_tile, sums);
        if (t == 0) {
          sum_mass[sums.channel(0)] = sums.mass[0] + sums.mass[1];
          sum_mass[sums.channel(1)] = sums.mass[2] + sums.mass[3];
        }
      }
      PairSums dots, scores;
      begin_products();
      multiply<kSteps>(dots, v_rows, ByRows<kChunk>(g_tile, 0), false);
      if constexpr (kDiag) {
        multiply<kSteps>(scores, ByRows<kChunk>(k_tile, 0), ByRows<kChunk>(q_tile, 0), false);
      }
      commit_products();
      write_row_weights<kDim>(y_tile, q_tile, statistics,
                              scale_at(call.alpha, piece.s, piece.head + head) * kLog2E, dim);
      if (threadIdx.x < kChunk) {
        write_parts(row_delta, static_cast<int>(threadIdx.x), statistics[kChunk + threadIdx.x]);
      }
      if (head == 0) {
        write_keys<kDim>(eu_tile, k_tile, beta * kLog2E, valid, seen);
      }
      show_products();
      wait_products<0>();
      settle(dots);
      if constexpr (kDiag) settle(scores);
      if (head == 0 && call.channels < dim) {
        clear_padding<kDim>(eu_tile, call.channels);
        show_products();
      }
      PairWords p;
      if constexpr (kDiag) {
        diag_key_gradients(
            p, ds, scores, dots, Meetings::of_keys(causal.diag_log2, valid), diag_scale,
            {statistics + 2 * kChunk, statistics + 3 * kChunk, statistics + 4 * kChunk});
      }
      __syncthreads();
      const bool begun = !kGrouped || head > 0;  // du and dv_acc
      PairSums pairs;
      begin_products();
      multiply<kSteps>(pairs, eu_rows, ByRows<kChunk>(y_tile, 0), false);
      commit_products();
      if constexpr (!kGrouped) {
        multiply<kSteps>(du, v_rows, ByRows<kDim>(sum_tile, 64 * panel), false);
        multiply<kSteps>(dv_acc, eu_rows, ByColumns<kDim>(sum_tile, 64 * panel), false);
      }
      if constexpr (kDiag) {
        if constexpr (kGrouped) {
          multiply_words(near, ds, ByColumns<kChunk>(q_tile, 64 * panel), head > 0);
        }
        multiply_words(dv_acc, p, g_columns, begun);
      }
      commit_products();
      multiply<kParts>(sums.values, y_channels, ByColumns<kChunk>(g_tile, 0), true);
      multiply<kParts>(sums.mass, y_channels, Narrow(row_delta), true);
      commit_products();
      PairWords taken;
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const float2 delta = *reinterpret_cast<const float2*>(statistics + kChunk + 8 * n + 2 * t);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          take_delta(dots[n][2 * half], dots[n][2 * half + 1], delta);
        }
      }
      pack_triangle<true>(taken, dots);
      wait_products<2>();
      settle(pairs);
      PairWords words;
      pack_triangle<true>(words, pairs);
      begin_products();
      multiply_words(dv_acc, words, g_columns, kDiag || begun);
      multiply_words(du, taken, y_channels, begun);
      commit_products();
      wait_products<0>();
      settle(du);
      settle(dv_acc);
      settle(words);
      settle(taken);
      settle(sums.values);
      settle(sums.mass);
      if constexpr (kDiag) {
        settle(p);
        if constexpr (kGrouped) {
          settle(near);
          settle(ds);
        }
      }
    }
    if constexpr (kGrouped) {
      // Not with those of the first head: behind a branch the compiler waits for every product.
      const int last = stage_index == 0 ? Sizes::kStages - 1 : stage_index - 1;
      const unsigned char* const v_tile =
          shared + last * Sizes::kStageBytes + 2 * Sizes::kTileBytes;
      begin_products();
      multiply<kSteps>(du, ByRows<kChunk>(v_tile, 0), ByRows<kDim>(sum_tile, 64 * panel), true);
      multiply<kSteps>(dv_acc, eu_rows, ByColumns<kDim>(sum_tile, 64 * panel), true);
      commit_products();
      wait_products<0>();
      settle(du);
      settle(dv_acc);
    }
    const int row = chunk * kChunk + first;
    store_natural(dv, call.dv.token, row, piece.count, 64 * panel, dim_v, dv_acc, largest);
    RowOperand<64> eu;
    load_left<kChunk>(eu, eu_tile, first, panel);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 taken = *reinterpret_cast<const float2*>(sum_mass + 64 * panel + 8 * n + 2 * t);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float* const own = du[n] + 2 * half;
        const float2 e = unpack<Bf16>(eu[n / 2][2 * (n & 1) + half]);
        own[0] = beta * e.x * (own[0] - taken.x);
        own[1] = beta * e.y * (own[1] - taken.y);
        if constexpr (kDiag && kGrouped) {
          own[0] += near[n][2 * half];
          own[1] += near[n][2 * half + 1];
        }
      }
    }
    if constexpr (kDiag && !kGrouped) {
      begin_products();
      multiply_words(du, ds, ByColumns<kChunk>(near_queries, 64 * panel), true);
      commit_products();
      wait_products<0>();
      settle(du);
      settle(ds);
    }
    store_natural(dk, call.dk.token, row, piece.count, 64 * panel, dim, du, largest);
  }
  report_reach(causal, piece, largest.at_most(kLargestBf16));
#endif
}

}  // namespace lln::cuda::sm90
