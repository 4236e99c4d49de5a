// The forward walk of causal LLN in f32 and f16, by the formulas of tiled_causal_forward.cuh: with
// Ea = 2^(alpha q), Eu = 2^(beta k) and the state K = sum Eu (x) v, s = sum Eu over all keys before
// a chunk,
//   o = (Ea K + S v) / (Ea s + S 1),     S = Ea Eu^T inside the chunk, where row >= key.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_f32_causal_tiles.cuh"

namespace lln::cuda {

template <class T, int kDim>
struct FloatCausalForwardShape : FloatCausalShape<T, kDim> {
  using Base = FloatCausalShape<T, kDim>;
  // Ea, Eu, v, K, S, s, masses of slices of rows.
  static constexpr int kShared = 3 * Base::kTileBytes + Base::kStateBytes + Base::kPairBytes +
                                 (kDim + kFloatChunk * Base::kSlices) * 4;
};

// Sums of numerators of 16 rows become results: divided by the masses, with the weights of LLN.
__device__ inline void finish_float_causal(float (&acc)[4][4], const float (&mass)[2],
                                           const DeviceCall& call, const CausalPiece& piece,
                                           int row, int slice) {
  const int lane = threadIdx.x & 31, last = piece.count - 1;
  const RowFactor factor = row_factor(call.lln_weight, piece.sequence, piece.head);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const std::int64_t own = piece.begin + min(row + (lane >> 2) + 8 * half, last);
    const float times = inverse_of(mass[half]) * factor(own);
#pragma unroll
    for (int i = 0; i < 8; ++i) acc[i / 2][2 * half + i % 2] *= times;
  }
  const int column = 32 * slice + 8 * (lane & 3);
  if (call.lln_weight.channel == 0 || column >= call.dim_v) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float times = channel_factor(call.lln_weight, piece.head, column + i);
    acc[i / 2][i % 2] *= times;
    acc[i / 2][2 + i % 2] *= times;
  }
}

// One block per piece and query head; the heads of a group walk the same keys.
template <class T, int kDim>
__global__ void __launch_bounds__(2 * kDim, kDim == 128 ? 1 : 192 / kDim)
    float_causal_forward(const __grid_constant__ CausalCall causal) {
  using Shape = FloatCausalForwardShape<T, kDim>;
  using Part = FloatCausalPart<T, kDim>;
  LLN_DYNAMIC_SHARED(shared);
  unsigned char* const ea_tile = shared;
  unsigned char* const eu_tile = ea_tile + Shape::kTileBytes;
  unsigned char* const v_tile = eu_tile + Shape::kTileBytes;
  unsigned char* const state_tile = v_tile + Shape::kTileBytes;
  unsigned char* const pairs = state_tile + Shape::kStateBytes;
  float* const state_mass = reinterpret_cast<float*>(pairs + Shape::kPairBytes);
  float* const masses = state_mass + kDim;  // [row, slice]
  const DeviceCall& call = causal.call;
  const CausalPiece piece = find_causal_piece<false>(call);
  if (piece.s < 0) return;
  const Part part;
  const int lane = threadIdx.x & 31, channel = 32 * part.slice;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const T* const q_rows = piece.rows<const T>(call.q) + channel;
  T* const o = piece.rows<T>(call.o);
  RowFloats<32> q;
  FloatKeys<T> keys;
  const auto load = [&](int row) {
    load_float_rows<32>(q, q_rows, call.q.token, row, piece.count, dim - channel);
    keys.load(call, piece, row, part.slice);
  };
  load(part.first);
  if (piece.first) zero_rows_before(o, call.o.token, piece.sequence.key_first, dim_v);
  ChannelRows<kDim> state;
  if (!piece.first) {
    state.read(causal.before, piece.slot * call.heads_k + piece.head_k, dim, dim_v);
  }
  const float alpha = scale_at(call.alpha, piece.s, piece.head) * kLog2E;
  const float beta = scale_at(call.beta, piece.s, piece.head_k) * kLog2E;
  LargestFloat largest_q, largest_k, largest_o;
  for (int row = part.first; row - part.first < piece.count; row += kFloatChunk) {
    largest_q.see(q);
    float_exponentials(q, alpha, true, true, dim - channel);
    largest_k.see(keys.k);
    float_exponentials(keys.k, beta, keys.counts[0], keys.counts[1], dim - channel);
    part.write_rows(ea_tile, q);
    part.write_rows(eu_tile, keys.k);
    part.write_rows(v_tile, keys.v);
    write_split_state<Shape::kParts>(state_tile, state_mass, state);
    __syncthreads();
    float mass[2] = {0, 0};
    dot_float_rows(mass, q, state_mass + channel);
    load(row + kFloatChunk);
    if (part.sees_partners()) {
      typename Part::Pairs s = {};
      part.multiply_pairs(s, ea_tile, eu_tile);
      part.template mask_pairs<true>(s);
#pragma unroll
      for (int i = 0; i < 4 * Shape::kPairs; ++i) mass[i / 2 % 2] += s[i / 4][i % 4];
      part.write_pairs(pairs, s);
    }
    float* const own_masses = masses + (part.first + (lane >> 2)) * Shape::kSlices;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mass[half] = quad_sum(mass[half]);
      if ((lane & 3) == 0) own_masses[8 * half * Shape::kSlices + part.slice] = mass[half];
    }
    float acc[4][4] = {};
    part.template multiply_by_state<false>(acc, ea_tile, state_tile);
    part.meet_group();
    for (int step = 0; 16 * step <= part.first; ++step) {
      part.multiply_by_pairs(acc, pairs, v_tile, step);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mass[half] = 0;
#pragma unroll
      for (int i = 0; i < Shape::kSlices; ++i) {
        mass[half] += own_masses[8 * half * Shape::kSlices + i];
      }
    }
    to_direct<32>(acc);
    finish_float_causal(acc, mass, call, piece, row, part.slice);
    largest_o.see(acc);
    store_float_rows<32>(o + channel, call.o.token, row, piece.count, dim_v - channel, acc);
    add_split_chunk<Shape::kParts>(state, eu_tile, v_tile, [](int) { return 1.0F; });
    __syncthreads();  // the tiles have been read
  }
  bool good = largest_q.at_most(kLargestModerate / fabsf(alpha)) &&
              largest_k.at_most(kLargestModerate / fabsf(beta)) && largest_o.at_most(kLargestFloat);
  good = write_after(causal, piece, state) && good;
  report_reach(causal, piece, good);
}

}  // namespace lln::cuda
