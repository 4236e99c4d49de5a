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
  static constexpr int kShared = FloatWalkTiles<T, kDim>::kBytes + kFloatChunk * Base::kSlices * 4;
};

// Masses of rows, to which every warp of a group has a share: [row, slice].
template <int kSlices>
struct MassShares {
  float* own;  // of row g of the warp

  __device__ MassShares(float* all, int first)
      : own(all + (first + (static_cast<int>(threadIdx.x) & 31) / 4) * kSlices) {}

  // From the lanes of a row.
  __device__ void put(const float (&mass)[2], int slice) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float share = quad_sum(mass[half]);
      if ((threadIdx.x & 3) == 0) own[8 * half * kSlices + slice] = share;
    }
  }
  __device__ void sum(float (&mass)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mass[half] = 0;
#pragma unroll
      for (int i = 0; i < kSlices; ++i) mass[half] += own[8 * half * kSlices + i];
    }
  }
};

// S of the warp's rows and the keys that are its partners, and what it adds to their masses.
template <class T, int kDim>
__device__ inline void write_scores(float (&mass)[2], const FloatWalkTiles<T, kDim>& tiles,
                                    const FloatCausalPart<T, kDim>& part) {
  if (!part.sees_partners()) return;
  typename FloatCausalPart<T, kDim>::Pairs s = {};
  part.multiply_pairs(s, tiles.rows, tiles.eu);
  part.template mask_pairs<true>(s);
#pragma unroll
  for (int i = 0; i < 4 * FloatCausalShape<T, kDim>::kPairs; ++i) {
    mass[i / 2 % 2] += s[i / 4][i % 4];
  }
  part.write_pairs(tiles.pairs, s);
}

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
  LLN_DYNAMIC_SHARED(shared);
  const FloatWalkTiles<T, kDim> tiles(shared);
  const DeviceCall& call = causal.call;
  const CausalPiece piece = find_causal_piece<false>(call);
  if (piece.s < 0) return;
  const FloatCausalPart<T, kDim> part;
  const MassShares<FloatCausalShape<T, kDim>::kSlices> shares(tiles.behind, part.first);
  const int channel = 32 * part.slice;
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
  read_before(state, causal, piece);
  const float alpha = scale_at(call.alpha, piece.s, piece.head);
  const float beta = scale_at(call.beta, piece.s, piece.head_k);
  LargestFloat largest_q, largest_k, largest_o;
  for (int row = part.first; row - part.first < piece.count; row += kFloatChunk) {
    largest_q.see(q);
    largest_k.see(keys.k);
    query_exponentials(q, alpha * kLog2E, call, channel);
    keys.raise(beta, dim - channel);
    tiles.write(part, q, keys, state);
    __syncthreads();
    float mass[2] = {0, 0};
    dot_float_rows(mass, q, tiles.mass + channel);
    load(row + kFloatChunk);
    write_scores(mass, tiles, part);
    shares.put(mass, part.slice);
    float acc[4][4] = {};
    part.template multiply_by_state<false>(acc, tiles.rows, tiles.state);
    part.meet_group();
    for (int step = 0; 16 * step <= part.first; ++step) {
      part.multiply_by_pairs(acc, tiles.pairs, tiles.v, step);
    }
    shares.sum(mass);
    to_direct<32>(acc);
    finish_float_causal(acc, mass, call, piece, row, part.slice);
    largest_o.see(acc);
    store_float_rows<32>(o + channel, call.o.token, row, piece.count, dim_v - channel, acc);
    tiles.add_keys(state);
    __syncthreads();  // the tiles have been read
  }
  bool good = moderate(largest_q, alpha) && moderate(largest_k, beta) &&
              largest_o.at_most(largest_result<T>(call));
  good = write_after(causal, piece, state) && good;
  report_reach(causal, piece, good);
}

}  // namespace lln::cuda
