// The forward walk of causal LLN and LLN+Diag by warpgroup products. With Ea = 2^(alpha q),
// Eu = 2^(beta k) (reference 0, rounded to bf16) and the state K = sum Eu (x) v, s = sum Eu over
// all keys before a chunk,
//   o = (Ea K + S v) / (Ea s + S 1),     S = Ea Eu^T inside the chunk, where row >= key.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sm90/causal_diag.cuh"

namespace lln::cuda::sm90 {

// A block has two teams: one for keys, with the state, and one for rows. While the tensor core has
// a chunk's products, each makes its exponentials of the next chunk, in place.
template <int kDim>
struct ForwardShape : Shape<kDim> {
  using Base = Shape<kDim>;
  static constexpr int kThreads = 2 * Base::kTeam;
  static constexpr int kStages = 3;
  static constexpr int kStageBytes = 3 * Base::kTileBytes;  // q, then Ea; k, then Eu; v
  static constexpr int kPairBytes = kChunk * kChunk * 2;
  // K and s before this chunk and the next, weights of the diagonal block, ones, weights of
  // LLN+Diag by channels.
  static constexpr int kShared = kStages * kStageBytes + 2 * Base::kStateBytes + kPairBytes +
                                 2 * Base::kVectorBytes + Base::kOnesBytes + kDim * 8;
};

// The shared memory of a block.
template <int kDim>
struct ForwardTiles {
  using Sizes = ForwardShape<kDim>;
  unsigned char* shared;

  __device__ unsigned char* q(int chunk) const {
    return shared + chunk % Sizes::kStages * Sizes::kStageBytes;
  }
  __device__ unsigned char* k(int chunk) const { return q(chunk) + Sizes::kTileBytes; }
  __device__ unsigned char* v(int chunk) const { return k(chunk) + Sizes::kTileBytes; }
  __device__ unsigned char* state(int chunk) const {
    return shared + Sizes::kStages * Sizes::kStageBytes + (chunk & 1) * Sizes::kStateBytes;
  }
  __device__ unsigned char* near() const { return state(0) + 2 * Sizes::kStateBytes; }
  __device__ unsigned char* state_mass(int chunk) const {
    return near() + Sizes::kPairBytes + (chunk & 1) * Sizes::kVectorBytes;
  }
  __device__ unsigned char* ones() const { return state_mass(0) + 2 * Sizes::kVectorBytes; }
  __device__ float* channels() const {
    return reinterpret_cast<float*>(ones() + Sizes::kOnesBytes);
  }
};

// Where rows, and other keys, wait until the diagonal block's scores have been made of q and k, and
// where rows wait until its weights are there. Those who make them arrive and go on.
inline constexpr int kRowScoresBarrier = 1, kKeyScoresBarrier = 2, kNearBarrier = 3;
template <int kDim, bool kNear>
__device__ inline void scores_made() {
  if constexpr (kNear) {
    arrive_at(kRowScoresBarrier, 128 + Shape<kDim>::kTeam);
    if constexpr (Shape<kDim>::kGroups > 1) arrive_at(kKeyScoresBarrier, Shape<kDim>::kTeam);
  } else {
    meet(kKeyScoresBarrier, Shape<kDim>::kTeam);
  }
}

// The team of keys: Eu and the state. kNear: a warpgroup that also has the weights of the diagonal
// block, of the next chunk like the exponentials.
template <int kDim, bool kDiag, bool kNear, bool kGiven>
__device__ inline void walk_keys(const CausalCall& causal, const CausalPiece& piece,
                                 const ForwardTiles<kDim>& tiles) {
  using Sizes = ForwardShape<kDim>;
  const DeviceCall& call = causal.call;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const int warp = warp_index(), first = 16 * (warp & 3),
            panel = Sizes::kGroups == 1 ? 0 : warp >> 2;
  const KeyChunks<kDim> keys(call, piece);
  const int chunks = (piece.count + kChunk - 1) / kChunk;
  // Chunks behind the last one are zeros.
  const auto start = [&](int chunk) {
    const int at = chunk * kChunk;
    copy_chunk<kDim>(tiles.k(chunk), keys.k, keys.k_stride, at, keys.count, dim);
    copy_chunk<kDim>(tiles.v(chunk), keys.v, keys.v_stride, at, keys.count, dim_v);
    copy_commit();
  };
  const auto arrived = [&](int chunk) {
    const std::uint64_t valid = keys.valid(chunk * kChunk);
    if (keys.masked(valid)) clear_masked<kDim>(tiles.k(chunk), tiles.v(chunk), valid);
  };
  start(0);
  start(1);
  ChannelRows<kDim> state;
  if (!piece.first) {
    state.read(causal.before, piece.slot * call.heads_k + piece.head_k, dim, dim_v);
  }
  const GivenRows<kGiven> given(causal, piece);
  const float beta = scale_at(call.beta, piece.s, piece.head_k) * kLog2E;
  const float diag_scale = kLog2E * rsqrtf(static_cast<float>(call.channels));
  Largest largest;
  PairWords words;
  PairSums pairs;
  const auto start_scores = [&](int chunk) {
    multiply<Sizes::kSteps>(pairs, ByRows<kChunk>(tiles.q(chunk), 0),
                            ByRows<kChunk>(tiles.k(chunk), 0), false);
    commit_products();
  };
  const auto write_weights = [&](std::uint64_t valid) {
    diag_weights(pairs, Meetings::of_rows(causal.diag_log2, valid), diag_scale);
    pack_pairs(words, pairs);
  };
  copy_wait<0>();
  arrived(0);
  arrived(1);
  std::uint64_t valid = keys.valid(0);
  if constexpr (kDiag) {
    show_products();
    __syncthreads();
    if constexpr (kNear) {
      begin_products();
      start_scores(0);
      wait_products<0>();
      settle(pairs);
      write_weights(valid);
    }
    scores_made<kDim, kNear>();
  }
  write_keys<kDim>(tiles.k(0), tiles.k(0), beta, valid, largest);
  write_state(tiles.state(0), state, given);
  write_mass(tiles.state_mass(0), state, given);
  show_products();
  __syncthreads();
  for (int chunk = 0; chunk < chunks; ++chunk) {
    start(chunk + 2);
    if constexpr (kNear) {
      write_left<kChunk>(tiles.near(), words, first, 0);
      show_products();
      arrive_at(kNearBarrier, 128 + Sizes::kTeam);
    }
    // No branches while products are under way: the compiler would wait for them.
    valid = keys.valid((chunk + 1) * kChunk);
    const ByColumns<kChunk> eu_channels(tiles.k(chunk), 64 * panel);
    begin_products();
    if constexpr (kNear) start_scores(chunk + 1);
    multiply<kParts>(state.values, eu_channels, ByColumns<kChunk>(tiles.v(chunk), 0), true);
    multiply<kParts>(state.mass, eu_channels, Ones(tiles.ones()), true);
    commit_products();
    if constexpr (kNear) {
      wait_products<1>();
      settle(pairs);
    }
    if constexpr (kDiag) scores_made<kDim, kNear>();
    write_keys<kDim>(tiles.k(chunk + 1), tiles.k(chunk + 1), beta, valid, largest);
    if constexpr (kNear) write_weights(valid);
    wait_products<0>();
    settle(state.values);
    settle(state.mass);
    write_state(tiles.state(chunk + 1), state, given);
    write_mass(tiles.state_mass(chunk + 1), state, given);
    copy_wait<0>();
    arrived(chunk + 2);
    show_products();
    __syncthreads();
  }
  const bool reached = write_after(causal, piece, state);
  report_reach(causal, piece, reached && largest.at_most(kLargestModerate / fabsf(beta)));
}

// The team of rows: Ea, the chunk's own keys, and o.
template <int kDim, bool kDiag, bool kGiven>
__device__ inline void walk_rows(const CausalCall& causal, const CausalPiece& piece,
                                 const ForwardTiles<kDim>& tiles) {
  using Sizes = ForwardShape<kDim>;
  constexpr int kSteps = Sizes::kSteps;
  const DeviceCall& call = causal.call;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const int warp = warp_index() - Sizes::kTeam / 32;
  const int first = 16 * (warp & 3),
            panel = Sizes::kGroups == 1 ? 0 : warp >> 2;  // rows and columns of this warp
  const Bf16* const q = piece.rows<const Bf16>(call.q);
  Bf16* const o = piece.rows<Bf16>(call.o);
  const int chunks = (piece.count + kChunk - 1) / kChunk;
  const auto start = [&](int chunk) {
    copy_chunk<kDim>(tiles.q(chunk), q, call.q.token, chunk * kChunk, piece.count, dim);
    copy_commit();
  };
  const auto clear_padding_of = [&](int chunk) {
    if constexpr (!kGiven) {  // of appends, which have none
      if (call.channels < dim) clear_padding<kDim>(tiles.q(chunk), call.channels);
    }
  };
  start(0);
  start(1);
  const float alpha = scale_at(call.alpha, piece.s, piece.head) * kLog2E;
  const CausalWeights weights(call, piece);
  Largest largest_q, largest_o;
  const Ones one(tiles.ones());
  copy_wait<0>();
  if constexpr (kDiag) {
    show_products();
    __syncthreads();
    meet(kRowScoresBarrier, 128 + Sizes::kTeam);
  }
  write_queries<kDim>(tiles.q(0), tiles.q(0), alpha, dim, largest_q);
  clear_padding_of(0);
  show_products();
  __syncthreads();
  for (int chunk = 0; chunk < chunks; ++chunk) {
    start(chunk + 2);
    PairSums pairs, acc;
    float mass[4], part_mass[4];
    const ByRows<kChunk> ea(tiles.q(chunk), 0);
    const ByColumns<kChunk> values(tiles.v(chunk), 64 * panel);
    begin_products();
    multiply<kSteps>(pairs, ea, ByRows<kChunk>(tiles.k(chunk), 0), false);
    commit_products();
    multiply<kSteps>(acc, ea, ByColumns<kDim>(tiles.state(chunk), 64 * panel), false);
    multiply<kSteps>(mass, ea, Narrow(tiles.state_mass(chunk)), false);
    commit_products();
    if constexpr (!kDiag) {
      write_queries<kDim>(tiles.q(chunk + 1), tiles.q(chunk + 1), alpha, dim, largest_q);
    }
    wait_products<1>();
    settle(pairs);
    PairWords words;
    pack_triangle<false>(words, pairs);
    if constexpr (kDiag) meet(kNearBarrier, 128 + Sizes::kTeam);
    begin_products();
    multiply_words(acc, words, values, true);
    multiply_words(mass, words, one, true);
    if constexpr (kDiag) {
      const ByRows<kChunk> near(tiles.near(), 0);
      multiply<kParts>(pairs, near, values, false);
      multiply<kParts>(part_mass, near, one, false);
    }
    commit_products();
    if constexpr (kDiag) {
      meet(kRowScoresBarrier, 128 + Sizes::kTeam);
      write_queries<kDim>(tiles.q(chunk + 1), tiles.q(chunk + 1), alpha, dim, largest_q);
    }
    wait_products<0>();
    settle(acc);
    settle(mass);
    settle(words);
    const int row = chunk * kChunk + first;
    if constexpr (kDiag) {
      settle(pairs);
      settle(part_mass);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float x = part_mass[2 * half], inverse = x == 0 ? 0 : 1 / x;
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          pairs[n][2 * half] *= inverse;
          pairs[n][2 * half + 1] *= inverse;
        }
      }
      weights.join<kDim>(acc, pairs, mass, piece, row, tiles.channels() + 64 * panel);
    } else {
      const float inverse[2] = {mass[0] == 0 ? 0 : 1 / mass[0], mass[2] == 0 ? 0 : 1 / mass[2]};
#pragma unroll
      for (int n = 0; n < 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] *= inverse[i >> 1];
      }
    }
    store_natural(o, call.o.token, row, piece.count, 64 * panel, dim_v, acc, largest_o);
    clear_padding_of(chunk + 1);
    copy_wait<0>();
    show_products();
    __syncthreads();
  }
  report_reach(
      causal, piece,
      largest_q.at_most(kLargestModerate / fabsf(alpha)) && largest_o.at_most(kLargestBf16));
}

// One block per piece and query head; the heads of a group walk the same keys.
template <int kDim, bool kDiag, bool kGiven>
__global__ void __launch_bounds__(4 * kDim, kDim == 64 ? 2 : 1)
    causal_forward(const __grid_constant__ CausalCall causal) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  LLN_DYNAMIC_SHARED(shared);
  const ForwardTiles<kDim> tiles{shared};
  const DeviceCall& call = causal.call;
  const CausalPiece piece = find_causal_piece<false>(call);
  if (piece.s < 0) return;
  if (piece.first) {
    zero_rows_before(piece.rows<Bf16>(call.o), call.o.token, piece.sequence.key_first,
                     static_cast<int>(call.dim_v));
  }
  write_ones(tiles.ones());
  if constexpr (kDiag) CausalWeights(call, piece).write_channels<kDim>(tiles.channels());
  const int team = warp_index() / (Shape<kDim>::kTeam / 32);
  if (team != 0) {
    walk_rows<kDim, kDiag, kGiven>(causal, piece, tiles);
  } else if (kDim == 64 || !kDiag || warp_index() < 4) {
    walk_keys<kDim, kDiag, kDiag, kGiven>(causal, piece, tiles);
  } else {
    walk_keys<kDim, kDiag, false, kGiven>(causal, piece, tiles);
  }
#endif
}

}  // namespace lln::cuda::sm90
