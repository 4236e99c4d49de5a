// The first backward walk of causal LLN and LLN+Diag by warpgroup products, from the first chunk of
// a piece to the last: dq, and for every row 1 / mass and delta. With K, s before the chunk
// (causal_forward.cuh)
//   Z = s + tril(1) Eu,  X = g K^T + tril(g v^T) Eu      [rows, channels]
//   mass = Ea . Z,  delta = Ea . X / mass,  dq = alpha Ea / mass (X - delta Z).
// Where a sequence has several pieces it also sums G = Y^T g and T = Y^T delta, Y = Ea / mass.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sm90/causal_diag.cuh"
#include "cuda/tiled_causal_rows.cuh"

namespace lln::cuda::sm90 {

template <int kDim>
struct RowsShape : Shape<kDim> {
  using Base = Shape<kDim>;
  static constexpr int kStages = 2;
  static constexpr int kStageBytes = 4 * Base::kTileBytes;  // q, k, v, g
  static constexpr int kTriangleBytes = kChunk * kChunk * 2;
  static constexpr int kDeltaBytes = kChunk * 16;  // Narrow
  // Eu, K, tril(1), delta, ones, s, masses and products of half rows.
  static constexpr int kShared = kStages * kStageBytes + Base::kTileBytes + Base::kStateBytes +
                                 kTriangleBytes + kDeltaBytes + Base::kOnesBytes + kDim * 4 +
                                 4 * kChunk * 4;
};

// Ones up to the diagonal.
template <int kThreads>
__device__ inline void write_triangle(unsigned char* tile) {
  for (int i = static_cast<int>(threadIdx.x); i < kChunk * 8; i += kThreads) {
    const int row = i / 8, piece = i % 8;
    const auto word = [&](int j) {
      const int key = 8 * piece + 2 * j;
      return pack<Bf16>(key <= row ? 1 : 0, key + 1 <= row ? 1 : 0);
    };
    *reinterpret_cast<uint4*>(tile + panel_offset<kChunk>(row, piece)) = {word(0), word(1), word(2),
                                                                          word(3)};
  }
}

// One block per piece and query head. kSums: also the sums G and T of the piece.
template <int kDim, bool kDiag, bool kSums>
__global__ void __launch_bounds__(2 * kDim, kDim == 64 ? 2 : 1)
    causal_rows(const __grid_constant__ CausalCall causal) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Sizes = RowsShape<kDim>;
  constexpr int kSteps = Sizes::kSteps;
  LLN_DYNAMIC_SHARED(shared);
  unsigned char* const eu_tile = shared + Sizes::kStages * Sizes::kStageBytes;
  unsigned char* const state_tile = eu_tile + Sizes::kTileBytes;
  unsigned char* const triangle = state_tile + Sizes::kStateBytes;
  unsigned char* const row_delta = triangle + Sizes::kTriangleBytes;
  unsigned char* const ones = row_delta + Sizes::kDeltaBytes;
  float* const state_mass = reinterpret_cast<float*>(ones + Sizes::kOnesBytes);
  float* const halves = state_mass + kDim;  // [mass, product][half][row]
  const DeviceCall& call = causal.call;
  const CausalPiece piece = find_causal_piece<false>(call);
  if (piece.s < 0) return;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const int warp = warp_index(), lane = threadIdx.x & 31, t = lane & 3;
  const int first = 16 * (warp & 3),
            panel = Sizes::kGroups == 1 ? 0 : warp >> 2;  // rows and channels of this warp
  const KeyChunks<kDim> keys(call, piece);
  const Bf16* const q = piece.rows<const Bf16>(call.q);
  const Bf16* const g = piece.rows<const Bf16>(call.g);
  Bf16* const dq = piece.rows<Bf16>(call.dq);
  const int chunks = (piece.count + kChunk - 1) / kChunk;
  const auto start = [&](int chunk) {
    if (chunk < chunks) {
      unsigned char* const stage = shared + chunk % Sizes::kStages * Sizes::kStageBytes;
      const int at = chunk * kChunk;
      copy_chunk<kDim>(stage, q, call.q.token, at, piece.count, dim);
      copy_chunk<kDim>(stage + Sizes::kTileBytes, keys.k, keys.k_stride, at, keys.count, dim);
      copy_chunk<kDim>(stage + 2 * Sizes::kTileBytes, keys.v, keys.v_stride, at, keys.count, dim_v);
      copy_chunk<kDim>(stage + 3 * Sizes::kTileBytes, g, call.g.token, at, piece.count, dim_v);
    }
    copy_commit();
  };
  for (int chunk = 0; chunk < Sizes::kStages - 1; ++chunk) start(chunk);
  if (piece.first) zero_rows_before(dq, call.dq.token, piece.sequence.key_first, dim);
  write_ones(ones);
  write_triangle<Sizes::kTeam>(triangle);
  if constexpr (kSums) write_zeros<Sizes::kTeam>(row_delta, Sizes::kDeltaBytes);
  ChannelRows<kDim> state, sums;
  if (!piece.first) {
    state.read(causal.before, piece.slot * call.heads_k + piece.head_k, dim, dim_v);
  }
  const float alpha = scale_at(call.alpha, piece.s, piece.head);
  const float beta = scale_at(call.beta, piece.s, piece.head_k) * kLog2E;
  const CausalWeights weights(call, piece);
  const std::int64_t statistics = statistics_at(causal, piece, piece.head);
  Largest largest_q, largest_k, largest_dq;
  const ByColumns<kChunk> eu_channels(eu_tile, 64 * panel);
  for (int chunk = 0; chunk < chunks; ++chunk) {
    copy_wait<Sizes::kStages - 2>();
    show_products();
    __syncthreads();
    start(chunk + Sizes::kStages - 1);
    unsigned char* const q_tile = shared + chunk % Sizes::kStages * Sizes::kStageBytes;
    unsigned char* const k_tile = q_tile + Sizes::kTileBytes;
    unsigned char* const v_tile = k_tile + Sizes::kTileBytes;
    unsigned char* const g_tile = v_tile + Sizes::kTileBytes;
    const std::uint64_t valid = keys.valid(chunk * kChunk);
    if (keys.masked(valid)) {
      clear_masked<kDim>(k_tile, v_tile, valid);
      show_products();
      __syncthreads();
    }
    const int row = chunk * kChunk + first;
    const ByRows<kChunk> g_rows(g_tile, 0);
    write_state(state_tile, state);
    if (t == 0) {
      state_mass[state.channel(0)] = state.mass[0];
      state_mass[state.channel(1)] = state.mass[2];
    }
    PairSums dots, scores;
    begin_products();
    multiply<kSteps>(dots, g_rows, ByRows<kChunk>(v_tile, 0), false);
    if constexpr (kDiag) {
      multiply<kSteps>(scores, ByRows<kChunk>(q_tile, 0), ByRows<kChunk>(k_tile, 0), false);
    }
    commit_products();
    write_keys<kDim>(eu_tile, k_tile, beta, valid, largest_k);
    RowOperand<64> ea;
    load_left<kChunk>(ea, q_tile, first, panel);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) largest_q.see(ea[step][i]);
    }
    row_exponentials<64>(ea, alpha * kLog2E, dim - 64 * panel);
    show_products();
    wait_products<0>();
    settle(dots);
    if constexpr (kDiag) settle(scores);
    if (call.channels < dim) clear_row_padding<64>(ea, call.channels - 64 * panel);
    PairWords words, near;
    if constexpr (kDiag) {
      DiagRow rows[2];
      const float weight[2] = {weights.diag_at(piece, row, 0), weights.diag_at(piece, row, 1)};
      diag_row_gradients(near, rows, scores, dots, Meetings::of_rows(causal.diag_log2, valid),
                         weights.diag_scale, weight);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = row + (lane >> 2) + 8 * half;
        if (panel != 0 || t != 0 || own >= piece.count) continue;
        causal.diag_mass[statistics + own] = rows[half].mass;
        causal.diag_delta[statistics + own] = rows[half].delta;
        causal.diag_weight[statistics + own] = weight[half];
      }
    }
    pack_triangle<false>(words, dots);
    __syncthreads();
    PairSums x, z;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 s = *reinterpret_cast<const float2*>(state_mass + 64 * panel + 8 * n + 2 * t);
      z[n][0] = z[n][2] = s.x;
      z[n][1] = z[n][3] = s.y;
    }
    begin_products();
    multiply<kParts>(z, ByRows<kChunk>(triangle, 0), eu_channels, true);
    multiply<kSteps>(x, g_rows, ByRows<kDim>(state_tile, 64 * panel), false);
    multiply_words(x, words, eu_channels, true);
    commit_products();
    multiply<kParts>(state.values, eu_channels, ByColumns<kChunk>(v_tile, 0), true);
    multiply<kParts>(state.mass, eu_channels, Ones(ones), true);
    commit_products();
    wait_products<1>();
    settle(x);
    settle(z);
    settle(words);
    float mass[2], product[2];
    dot_rows(mass, ea, z);
    dot_rows(product, ea, x);
    if constexpr (Sizes::kGroups > 1) add_halves(mass, product, halves, first, panel);
    float inverse[2], delta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      inverse[half] = mass[half] == 0 ? 0 : 1 / mass[half];
      delta[half] = product[half] * inverse[half];
      if constexpr (kDiag) inverse[half] *= weights.lln_at(piece, row, half);
      const int own = row + (lane >> 2) + 8 * half;
      if (panel == 0 && t == 0) {
        if (own < piece.count) {
          causal.inverse[statistics + own] = inverse[half];
          causal.delta[statistics + own] = delta[half];
        }
        if constexpr (kSums) write_parts(row_delta, first + (lane >> 2) + 8 * half, delta[half]);
      }
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t& word = ea[n / 2][2 * (n & 1) + half];
        const float2 e = unpack<Bf16>(word);
        const float2 y = {e.x * inverse[half], e.y * inverse[half]};
        if constexpr (kSums) word = pack<Bf16>(y.x, y.y);
        float* const own = x[n] + 2 * half;
        own[0] = alpha * y.x * fmaf(-delta[half], z[n][2 * half], own[0]);
        own[1] = alpha * y.y * fmaf(-delta[half], z[n][2 * half + 1], own[1]);
      }
    }
    if constexpr (kDiag) {
      begin_products();
      multiply_words(x, near, ByColumns<kChunk>(k_tile, 64 * panel), true);
      commit_products();
    }
    if constexpr (kSums) {
      if (!piece.first) {
        write_left<kChunk>(q_tile, ea, first, panel);
        show_products();
        __syncthreads();
        const ByColumns<kChunk> y(q_tile, 64 * panel);
        begin_products();
        multiply<kParts>(sums.values, y, ByColumns<kChunk>(g_tile, 0), true);
        multiply<kParts>(sums.mass, y, Narrow(row_delta), true);
        commit_products();
      }
    }
    if constexpr (kDiag) {
      wait_products<0>();
      settle(x);
      settle(near);
    }
    store_natural(dq, call.dq.token, row, piece.count, 64 * panel, dim, x, largest_dq);
    wait_products<0>();
    settle(state.values);
    settle(state.mass);
    if constexpr (kSums) {
      settle(sums.values);
      settle(sums.mass);
    }
  }
  if constexpr (kSums) {
    if (!piece.first) {
      sums.fold_mass();
      sums.write(causal.behind, piece.slot * call.heads + piece.head, dim, dim_v);
    }
  }
  report_reach(causal, piece,
               largest_q.at_most(kLargestModerate / fabsf(alpha * kLog2E)) &&
                   largest_k.at_most(kLargestModerate / fabsf(beta)) &&
                   largest_dq.at_most(kLargestBf16));
#endif
}

}  // namespace lln::cuda::sm90
