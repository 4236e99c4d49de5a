// The forward walk of causal LLN and LLN+Diag by warpgroup products. With Ea = 2^(alpha q),
// Eu = 2^(beta k) (reference 0, rounded to bf16) and the state K = sum Eu (x) v, s = sum Eu over
// all keys before a chunk,
//   o = (Ea K + S v) / (Ea s + S 1),     S = Ea Eu^T inside the chunk, where row >= key.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sm90/causal_diag.cuh"

namespace lln::cuda::sm90 {

template <int kDim>
struct ForwardShape : Shape<kDim> {
  using Base = Shape<kDim>;
  static constexpr int kStages = 3;
  static constexpr int kStageBytes = 3 * Base::kTileBytes;  // q, then Ea; k, then Eu; v
  // K and s before this chunk and the next, ones, weights of LLN+Diag by channels.
  static constexpr int kShared = kStages * kStageBytes + 2 * Base::kStateBytes +
                                 2 * Base::kVectorBytes + Base::kOnesBytes + kDim * 8;
};

// One block per piece and query head; the heads of a group walk the same keys. While the tensor
// core has a chunk's products, the threads make the exponentials of the next one, in place, and its
// weights in the diagonal block.
template <int kDim, bool kDiag>
__global__ void __launch_bounds__(2 * kDim, kDim == 64 ? 2 : 1)
    causal_forward(const __grid_constant__ CausalCall causal) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Sizes = ForwardShape<kDim>;
  constexpr int kSteps = Sizes::kSteps;
  extern __shared__ __align__(1024) unsigned char shared[];
  unsigned char* const states = shared + Sizes::kStages * Sizes::kStageBytes;
  unsigned char* const masses = states + 2 * Sizes::kStateBytes;
  unsigned char* const ones = masses + 2 * Sizes::kVectorBytes;
  float* const channels = reinterpret_cast<float*>(ones + Sizes::kOnesBytes);
  const DeviceCall& call = causal.call;
  const CausalPiece piece = find_causal_piece<false>(call);
  if (piece.s < 0) return;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const int warp = warp_index();
  const int first = 16 * (warp & 3), panel = warp >> 2;  // rows and columns of this warp
  const KeyChunks<kDim> keys(call, piece);
  const Bf16* const q = piece.rows<const Bf16>(call.q);
  Bf16* const o = piece.rows<Bf16>(call.o);
  const int chunks = (piece.count + kChunk - 1) / kChunk;
  const auto stage = [&](int chunk) {
    return shared + chunk % Sizes::kStages * Sizes::kStageBytes;
  };
  // Chunks behind the last one are zeros.
  const auto start = [&](int chunk) {
    unsigned char* const to = stage(chunk);
    const int at = chunk * kChunk;
    copy_chunk<kDim>(to, q, call.q.token, at, piece.count, dim);
    copy_chunk<kDim>(to + Sizes::kTileBytes, keys.k, keys.k_stride, at, keys.count, dim);
    copy_chunk<kDim>(to + 2 * Sizes::kTileBytes, keys.v, keys.v_stride, at, keys.count, dim_v);
    copy_commit();
  };
  start(0);
  start(1);
  if (piece.first) zero_rows_before(o, call.o.token, piece.sequence.key_first, dim_v);
  write_ones(ones);
  ChannelRows<kDim> state;
  if (!piece.first) {
    state.read(causal.before, piece.slot * call.heads_k + piece.head_k, dim, dim_v);
  }
  const float alpha = scale_at(call.alpha, piece.s, piece.head) * kLog2E;
  const float beta = scale_at(call.beta, piece.s, piece.head_k) * kLog2E;
  const CausalWeights weights(call, piece);
  if constexpr (kDiag) weights.write_channels<kDim>(channels);
  Largest largest_q, largest_k, largest_o;
  // What a thread has to do when its own part of a chunk has arrived.
  const auto arrived = [&](int chunk) {
    const std::uint64_t valid = keys.valid(chunk * kChunk);
    unsigned char* const k_tile = stage(chunk) + Sizes::kTileBytes;
    if (keys.masked(valid)) clear_masked<kDim>(k_tile, k_tile + Sizes::kTileBytes, valid);
  };
  const auto write_exponentials = [&](int chunk, std::uint64_t valid) {
    unsigned char* const q_tile = stage(chunk);
    unsigned char* const k_tile = q_tile + Sizes::kTileBytes;
    write_keys<kDim>(k_tile, k_tile, beta, valid, largest_k);
    write_queries<kDim>(q_tile, q_tile, alpha, dim, largest_q);
  };
  const auto start_near = [&](PairSums& pairs, int chunk) {
    multiply<kSteps>(pairs, ByRows<kChunk>(stage(chunk), 0),
                     ByRows<kChunk>(stage(chunk) + Sizes::kTileBytes, 0), false);
    commit_products();
  };
  const auto finish_near = [&](PairWords& words, PairSums& pairs, std::uint64_t valid) {
    settle(pairs);
    __syncthreads();  // all have read q and k
    diag_weights(pairs, Meetings::of_rows(causal.diag_log2, valid), weights.diag_scale);
    pack_pairs(words, pairs);
  };
  PairWords near, next_near;
  copy_wait<0>();
  arrived(0);
  arrived(1);
  std::uint64_t next_valid = keys.valid(0);
  if constexpr (kDiag) {
    show_products();
    __syncthreads();
    PairSums pairs;
    begin_products();
    start_near(pairs, 0);
    wait_products<0>();
    finish_near(next_near, pairs, next_valid);
  }
  write_exponentials(0, next_valid);
  write_state(states, state);
  write_mass(masses, state);
  show_products();
  __syncthreads();
  for (int chunk = 0; chunk < chunks; ++chunk) {
    start(chunk + 2);
    unsigned char* const v_tile = stage(chunk) + 2 * Sizes::kTileBytes;
    const ByRows<kChunk> ea(stage(chunk), 0), eu(stage(chunk) + Sizes::kTileBytes, 0);
    const ByColumns<kChunk> eu_channels(stage(chunk) + Sizes::kTileBytes, 64 * panel);
    const ByColumns<kChunk> values(v_tile, 64 * panel);
    const Ones one(ones);
    PairSums pairs, acc, part, next_pairs;
    float mass[4], part_mass[4];
    if constexpr (kDiag) {
#pragma unroll
      for (int i = 0; i < 4 * kParts; ++i) near[i / 4][i % 4] = next_near[i / 4][i % 4];
    }
    // No branches while products are under way: the compiler would wait for them.
    next_valid = keys.valid((chunk + 1) * kChunk);
    begin_products();
    if constexpr (kDiag) start_near(next_pairs, chunk + 1);
    multiply<kSteps>(pairs, ea, eu, false);
    commit_products();
    multiply<kSteps>(acc, ea,
                     ByColumns<kDim>(states + (chunk & 1) * Sizes::kStateBytes, 64 * panel), false);
    multiply<kSteps>(mass, ea, Narrow(masses + (chunk & 1) * Sizes::kVectorBytes), false);
    if constexpr (kDiag) {
      multiply_words(part, near, values, false);
      multiply_words(part_mass, near, one, false);
    }
    commit_products();
    multiply<kParts>(state.values, eu_channels, ByColumns<kChunk>(v_tile, 0), true);
    multiply<kParts>(state.mass, eu_channels, one, true);
    commit_products();
    if constexpr (kDiag) {
      wait_products<3>();
      finish_near(next_near, next_pairs, next_valid);
    }
    write_exponentials(chunk + 1, next_valid);
    wait_products<2>();
    settle(pairs);
    PairWords words;
    pack_triangle<false>(words, pairs);
    begin_products();
    multiply_words(acc, words, values, true);
    multiply_words(mass, words, one, true);
    commit_products();
    wait_products<0>();
    settle(acc);
    settle(mass);
    settle(words);
    settle(state.values);
    settle(state.mass);
    write_state(states + (~chunk & 1) * Sizes::kStateBytes, state);
    write_mass(masses + (~chunk & 1) * Sizes::kVectorBytes, state);
    const int row = chunk * kChunk + first;
    if constexpr (kDiag) {
      settle(part);
      settle(part_mass);
      settle(near);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float x = part_mass[2 * half], inverse = x == 0 ? 0 : 1 / x;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          part[n][2 * half] *= inverse;
          part[n][2 * half + 1] *= inverse;
        }
      }
      weights.join<kDim>(acc, part, mass, piece, row, channels + 64 * panel);
    } else {
      const float inverse[2] = {mass[0] == 0 ? 0 : 1 / mass[0], mass[2] == 0 ? 0 : 1 / mass[2]};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] *= inverse[i >> 1];
      }
    }
    store_natural(o, call.o.token, row, piece.count, 64 * panel, dim_v, acc, largest_o);
    copy_wait<0>();
    arrived(chunk + 2);
    show_products();
    __syncthreads();
  }
  bool good = largest_q.at_most(kLargestModerate / fabsf(alpha)) &&
              largest_k.at_most(kLargestModerate / fabsf(beta)) && largest_o.at_most(kLargestBf16);
  if (piece.last && causal.saved.c != nullptr && piece.head % (call.heads / call.heads_k) == 0) {
    good = save_state(causal.saved, piece, state, dim, dim_v) && good;
  }
  report_reach(causal, piece, good);
#endif
}

}  // namespace lln::cuda::sm90
