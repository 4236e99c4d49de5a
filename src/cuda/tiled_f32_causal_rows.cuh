// The first backward walk of causal LLN in f32 and f16, from the first chunk of a piece to the
// last, by the formulas of tiled_causal_rows.cuh: dq, and for every row 1 / mass and delta. With K,
// s before the chunk (tiled_f32_causal_forward.cuh)
//   Z = s + tril(1) Eu,  X = g K^T + tril(g v^T) Eu      [rows, channels]
//   mass = Ea . Z,  delta = Ea . X / mass,  dq = alpha Ea / mass (X - delta Z).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_f32_causal_tiles.cuh"

namespace lln::cuda {

template <class T, int kDim>
struct FloatCausalRowsShape : FloatCausalShape<T, kDim> {
  using Base = FloatCausalShape<T, kDim>;
  // g, v, Eu, K, g v^T, s, masses and dots of slices of rows.
  static constexpr int kShared =
      FloatWalkTiles<T, kDim>::kBytes + 2 * kFloatChunk * Base::kSlices * 4;
};

// z += tril(1) Eu for 16 rows, 16 keys and 32 channels. Ones are exact in one part; sums as in
// mma_split.
template <class T, int kDim>
__device__ inline void add_keys_up_to_row(float (&z)[4][4], const FloatCausalPart<T, kDim>& part,
                                          const unsigned char* eu_tile, int step) {
  const int lane = threadIdx.x & 31;
  std::uint32_t ones[4];
  ones_up_to_row(ones, 16 * step == part.first);
#pragma unroll
  for (int n = 0; n < 4; n += 2) {
    __syncwarp();  // as in multiply_split_step
    std::uint32_t b[kCausalParts<T>][4];
    load_split<kSplitPart<kFloatChunk, kDim>, true>(
        b, shared_address(eu_tile) +
               tile_offset<kDim>(16 * step + (lane & 15), 4 * part.slice + n + (lane >> 4)));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float small[4] = {}, large[4] = {};
#pragma unroll
      for (int p = kCausalParts<T> - 1; p > 0; --p) {
        mma(small, ones, b[p][2 * i], b[p][2 * i + 1]);
      }
      mma(large, ones, b[0][2 * i], b[0][2 * i + 1]);
#pragma unroll
      for (int j = 0; j < 4; ++j) z[n + i][j] += large[j] + small[j];
    }
  }
}

// X and Z of the warp's rows at its channels, after tril(g v^T) has been shared with its group.
template <class T, int kDim>
__device__ inline void multiply_causal_rows(float (&x)[4][4], float (&z)[4][4],
                                            const FloatWalkTiles<T, kDim>& tiles,
                                            const FloatCausalPart<T, kDim>& part) {
  if (part.sees_partners()) {
    typename FloatCausalPart<T, kDim>::Pairs products = {};
    part.multiply_pairs(products, tiles.rows, tiles.v);
    part.template mask_pairs<true>(products);
    part.write_pairs(tiles.pairs, products);
  }
  part.template multiply_by_state<true>(x, tiles.rows, tiles.state);
  part.meet_group();
  for (int step = 0; 16 * step <= part.first; ++step) {
    part.multiply_by_pairs(x, tiles.pairs, tiles.eu, step);
    add_keys_up_to_row(z, part, tiles.eu, step);
  }
  to_direct<32>(x);
  to_direct<32>(z);
  const float* const mass = tiles.mass + 32 * part.slice + 8 * (threadIdx.x & 3);
#pragma unroll
  for (int i = 0; i < 16; ++i) z[i % 8 / 2][i / 8 * 2 + i % 2] += mass[i % 8];
}

// Sums of e z and e x over all channels of 16 rows, which the warps of a group exchange: [row,
// slice, mass or dot].
template <class T, int kDim>
__device__ inline void exchange_float_causal(float (&mass)[2], float (&dot)[2],
                                             const RowFloats<32>& e, const float (&x)[4][4],
                                             const float (&z)[4][4], float2* shares,
                                             const FloatCausalPart<T, kDim>& part) {
  constexpr int kSlices = FloatCausalShape<T, kDim>::kSlices;
  const int lane = threadIdx.x & 31;
  float2* const own = shares + (part.first + (lane >> 2)) * kSlices;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    mass[half] = dot[half] = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float weight = e[0][half][i];
      mass[half] = fmaf(weight, z[i / 2][2 * half + i % 2], mass[half]);
      dot[half] = fmaf(weight, x[i / 2][2 * half + i % 2], dot[half]);
    }
    mass[half] = quad_sum(mass[half]);
    dot[half] = quad_sum(dot[half]);
    if ((lane & 3) == 0) own[8 * half * kSlices + part.slice] = {mass[half], dot[half]};
  }
  part.meet_group();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    mass[half] = dot[half] = 0;
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      const float2 share = own[8 * half * kSlices + i];
      mass[half] += share.x;
      dot[half] += share.y;
    }
  }
}

// X becomes dq, and 1 / mass and delta of the rows are kept.
__device__ inline void finish_float_causal_rows(float (&x)[4][4], const float (&z)[4][4],
                                                const RowFloats<32>& e, const float (&mass)[2],
                                                const float (&dot)[2], float alpha,
                                                const CausalCall& causal, const CausalPiece& piece,
                                                int row, int slice) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float inverse = inverse_of(mass[half]), delta = dot[half] * inverse;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& own = x[i / 2][2 * half + i % 2];
      own = alpha * e[0][half][i] * inverse * fmaf(-delta, z[i / 2][2 * half + i % 2], own);
    }
    const int own_row = row + (lane >> 2) + 8 * half;
    if (slice != 0 || (lane & 3) != 0 || own_row >= piece.count) continue;
    const std::int64_t at = statistics_at(causal, piece, piece.head) + own_row;
    causal.inverse[at] = inverse;
    causal.delta[at] = delta;
  }
}

// One block per piece and query head.
template <class T, int kDim>
__global__ void __launch_bounds__(2 * kDim, 128 / kDim)
    float_causal_rows(const __grid_constant__ CausalCall causal) {
  LLN_DYNAMIC_SHARED(shared);
  const FloatWalkTiles<T, kDim> tiles(shared);
  float2* const shares = reinterpret_cast<float2*>(tiles.behind);
  const DeviceCall& call = causal.call;
  const CausalPiece piece = find_causal_piece<false>(call);
  if (piece.s < 0) return;
  const FloatCausalPart<T, kDim> part;
  const int channel = 32 * part.slice;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const T* const q_rows = piece.rows<const T>(call.q) + channel;
  const T* const g_rows = piece.rows<const T>(call.g) + channel;
  T* const dq = piece.rows<T>(call.dq);
  RowFloats<32> e, g;
  FloatKeys<T> keys;
  const auto load = [&](int row) {
    load_float_rows<32>(g, g_rows, call.g.token, row, piece.count, dim_v - channel);
    keys.load(call, piece, row, part.slice);
  };
  load(part.first);
  if (piece.first) zero_rows_before(dq, call.dq.token, piece.sequence.key_first, dim);
  ChannelRows<kDim> state;
  read_before(state, causal, piece);
  const float alpha = scale_at(call.alpha, piece.s, piece.head);
  const float beta = scale_at(call.beta, piece.s, piece.head_k);
  LargestFloat largest_q, largest_k, largest_dq;
  for (int row = part.first; row - part.first < piece.count; row += kFloatChunk) {
    weigh_causal_rows(g, call, piece, piece.head, row, part.slice);
    largest_k.see(keys.k);
    keys.raise(beta, dim - channel);
    tiles.write(part, g, keys, state);
    __syncthreads();
    load_float_rows<32>(e, q_rows, call.q.token, row, piece.count, dim - channel);
    load(row + kFloatChunk);
    float x[4][4] = {}, z[4][4] = {};
    multiply_causal_rows(x, z, tiles, part);
    largest_q.see(e);
    query_exponentials(e, alpha * kLog2E, call, channel);
    float mass[2], dot[2];
    exchange_float_causal(mass, dot, e, x, z, shares, part);
    finish_float_causal_rows(x, z, e, mass, dot, alpha, causal, piece, row, part.slice);
    largest_dq.see(x);
    store_float_rows<32>(dq + channel, call.dq.token, row, piece.count, dim - channel, x);
    tiles.add_keys(state);
    __syncthreads();  // the tiles have been read
  }
  report_reach(causal, piece,
               moderate(largest_q, alpha) && moderate(largest_k, beta) &&
                   largest_dq.at_most(largest_result<T>(call)));
}

}  // namespace lln::cuda
