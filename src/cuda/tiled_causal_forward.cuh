// The forward walk of causal LLN and LLN+Diag. With Ea = 2^(alpha q), Eu = 2^(beta k) (reference 0,
// rounded to bf16) and the state K = sum Eu (x) v, s = sum Eu over all keys before a chunk,
//   o = (Ea K + S v) / (Ea s + S 1),     S = Ea Eu^T inside the chunk, where row >= key.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_causal_chunks.cuh"
#include "cuda/tiled_causal_diag.cuh"

namespace lln::cuda {

template <int kDim>
struct CausalForwardShape : CausalShape<kDim> {
  using Base = CausalShape<kDim>;
  static constexpr int kStages = kDim <= 64 ? 2 : 3;
  static constexpr int kStageBytes = 3 * Base::kTileBytes;  // q, k, v
  static constexpr int kShared =
      kStages * kStageBytes + Base::kTileBytes + Base::kStateBytes + kDim * (2 + 8);
};

// Numerators and masses (in [0] and [2]) of 16 rows of a chunk.
template <int kDim>
__device__ inline void add_rows(float (&acc)[CausalShape<kDim>::kPart / 8][4], float (&mass)[4],
                                const RowOperand<kDim>& ea, int first, int column,
                                const unsigned char* eu_tile, const unsigned char* v_tile,
                                const unsigned char* state, const Bf16* state_mass) {
  const int t = threadIdx.x & 3;
  const std::uint32_t ones = pack<Bf16>(1, 1);
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    multiply_by_tile<kDim>(acc, ea[step], state, 16 * step, column);
    const auto* const s = reinterpret_cast<const std::uint32_t*>(state_mass + 16 * step + 2 * t);
    mma(mass, ea[step], s[0], s[4]);
  }
#pragma unroll
  for (int key = 0; key < kChunk; key += 16) {
    if (key > first) continue;
    float s[2][4] = {};
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      multiply_by_tile_rows<kDim>(s, ea[step], eu_tile, key, step);
    }
    if (key == first) mask_diagonal(s);
    std::uint32_t y[4];
    pack_left(y, s);
    mma(mass, y, ones, ones);
    multiply_by_tile<kDim>(acc, y, v_tile, key, column);
  }
}

// One block per piece and query head; the heads of a group walk the same keys.
template <int kDim, bool kDiag, bool kGiven>
__global__ void __launch_bounds__(2 * kDim, kDim <= 64 ? 3 : 1)
    causal_forward(const __grid_constant__ CausalCall causal) {
  using Shape = CausalForwardShape<kDim>;
  constexpr int kCount = Shape::kPart / 8;
  LLN_DYNAMIC_SHARED(shared);
  unsigned char* const eu_tile = shared + Shape::kStages * Shape::kStageBytes;
  unsigned char* const state_tile = eu_tile + Shape::kTileBytes;
  Bf16* const state_mass = reinterpret_cast<Bf16*>(state_tile + Shape::kStateBytes);
  float* const channels = reinterpret_cast<float*>(state_mass + kDim);  // weights of LLN+Diag
  const DeviceCall& call = causal.call;
  const CausalPiece piece = find_causal_piece<false>(call);
  if (piece.s < 0) return;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const int warp = warp_index();
  const int first = 16 * (warp & 3), column = 64 * (warp >> 2);  // rows and columns of this warp
  const KeyChunks<kDim> keys(call, piece);
  const Bf16* const q = piece.rows<const Bf16>(call.q);
  Bf16* const o = piece.rows<Bf16>(call.o);
  const int chunks = (piece.count + kChunk - 1) / kChunk;
  const auto start = [&](int chunk) {
    if (chunk < chunks) {
      unsigned char* const stage = shared + chunk % Shape::kStages * Shape::kStageBytes;
      keys.copy(stage + Shape::kTileBytes, stage + 2 * Shape::kTileBytes, chunk * kChunk);
      copy_chunk<kDim>(stage, q, call.q.token, chunk * kChunk, piece.count, dim);
    }
    copy_commit();
  };
  for (int chunk = 0; chunk < Shape::kStages - 1; ++chunk) start(chunk);
  if (piece.first) {
    zero_rows_before(o, call.o.token, piece.sequence.key_first, dim_v);
  }
  ChannelRows<kDim> state;
  if (!piece.first) {
    state.read(causal.before, piece.slot * call.heads_k + piece.head_k, dim, dim_v);
  }
  const GivenRows<kGiven> given(causal, piece);
  const float alpha = scale_at(call.alpha, piece.s, piece.head) * kLog2E;
  const float beta = scale_at(call.beta, piece.s, piece.head_k) * kLog2E;
  const CausalWeights weights(call, piece);
  if constexpr (kDiag) weights.write_channels<kDim>(channels);
  Largest largest_q, largest_k, largest_o;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    copy_wait<Shape::kStages - 2>();
    __syncthreads();
    start(chunk + Shape::kStages - 1);
    unsigned char* const stage = shared + chunk % Shape::kStages * Shape::kStageBytes;
    unsigned char* const k_tile = stage + Shape::kTileBytes;
    unsigned char* const v_tile = k_tile + Shape::kTileBytes;
    const std::uint64_t valid = keys.valid(chunk * kChunk);
    if (keys.masked(valid)) clear_masked<kDim>(k_tile, v_tile, valid);
    write_exponentials<kDim>(eu_tile, k_tile, beta, valid, largest_k);
    state.write_tile(state_tile, given);
    write_mass(state_mass, state, given);
    RowOperand<kDim> ea;
    load_left<kDim>(ea, stage, first);
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) largest_q.see(ea[step][i]);
    }
    float diag[kDiag ? kCount : 1][4] = {};
    if constexpr (kDiag) {
      diag_rows<kDim>(diag, ea, first, column, k_tile, v_tile, valid, causal.diag_log2,
                      weights.diag_scale);
    }
    row_exponentials<kDim>(ea, alpha, dim);
    if constexpr (!kGiven) {  // of appends, which have none
      if (call.channels < dim) clear_row_padding<kDim>(ea, call.channels);
    }
    __syncthreads();
    float acc[kCount][4] = {};
    float mass[4] = {};
    add_rows<kDim>(acc, mass, ea, first, column, eu_tile, v_tile, state_tile, state_mass);
    const int row = chunk * kChunk + first;
    if constexpr (kDiag) {
      weights.join<kDim>(acc, diag, mass, piece, row, channels + column);
    } else {
      const float inverse[2] = {mass[0] == 0 ? 0 : 1 / mass[0], mass[2] == 0 ? 0 : 1 / mass[2]};
#pragma unroll
      for (int n = 0; n < kCount; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] *= inverse[i >> 1];
      }
    }
    store_natural(o, call.o.token, row, piece.count, column, dim_v, acc, largest_o);
    add_chunk<kDim>(state, eu_tile, v_tile);
  }
  bool good = largest_q.at_most(kLargestModerate / fabsf(alpha)) &&
              largest_k.at_most(kLargestModerate / fabsf(beta)) && largest_o.at_most(kLargestBf16);
  good = write_after(causal, piece, state) && good;
  report_reach(causal, piece, good);
}

}  // namespace lln::cuda
