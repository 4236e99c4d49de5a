// The second backward walk of causal LLN in f32 and f16, from the last chunk of a piece to the
// first, by the formulas of tiled_causal_keys.cuh: dk and dv. With Y = Ea / mass of rows, G = sum Y
// (x) g and T = sum Y delta over all rows behind the chunk,
//   dv = triu(Eu Y^T) g + Eu G,   dk = beta Eu (triu(v g^T - delta) Y + v G^T - T).
// Sums over rows go over all query heads of a group, head by head in every chunk.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_f32_causal_sums.cuh"

namespace lln::cuda {

template <class T, int kDim>
struct FloatCausalKeysShape : FloatCausalShape<T, kDim> {
  using Base = FloatCausalShape<T, kDim>;
  // Eu, v, Y, g, G, Eu Y^T, v g^T - delta, T, delta.
  static constexpr int kShared =
      4 * Base::kTileBytes + Base::kStateBytes + 2 * Base::kPairBytes + (kDim + kFloatChunk) * 4;
};

// Where the parts of a chunk lie in shared memory.
template <class T, int kDim>
struct FloatCausalKeysTiles {
  using Shape = FloatCausalKeysShape<T, kDim>;
  using Part = FloatCausalPart<T, kDim>;

  unsigned char *eu, *v, *y, *g, *sums, *weights, *products;
  float *mass, *deltas;

  __device__ explicit FloatCausalKeysTiles(unsigned char* shared)
      : eu(shared),
        v(eu + Shape::kTileBytes),
        y(v + Shape::kTileBytes),
        g(y + Shape::kTileBytes),
        sums(g + Shape::kTileBytes),
        weights(sums + Shape::kStateBytes),
        products(weights + Shape::kPairBytes),
        mass(reinterpret_cast<float*>(products + Shape::kPairBytes)),
        deltas(mass + kDim) {}

  // What the warp's keys get from all rows behind the chunk: du over Eu, and dv.
  __device__ void add_rows_behind(float (&du)[4][4], float (&dv)[4][4], const Part& part) const {
    part.template multiply_by_state<false>(dv, eu, sums);
    part.template multiply_by_state<true>(du, v, sums);
    const float* const taken = mass + 32 * part.slice + 2 * (threadIdx.x & 3);
#pragma unroll
    for (int i = 0; i < 16; ++i) du[i / 4][i % 4] -= taken[i / 4 * 8 + i % 2];
  }

  // Pairs of the warp's keys and the rows that are its partners: triu(Eu Y^T), triu(v g^T - delta).
  __device__ void write_pairs(const Part& part) const {
    if (!part.is_seen()) return;
    typename Part::Pairs x = {};
    part.multiply_pairs(x, eu, y);
    part.template mask_pairs<false>(x);
    part.write_pairs(weights, x);
    clear(x);
    part.multiply_pairs(x, v, g);
#pragma unroll
    for (int i = 0; i < 4 * Shape::kPairs; ++i) {
      x[i / 4][i % 4] -= deltas[part.partner + i / 4 * 8 + 2 * (threadIdx.x & 3) + i % 2];
    }
    part.template mask_pairs<false>(x);
    part.write_pairs(products, x);
  }

  // What the warp's keys get from the rows of the chunk, after its group has met.
  __device__ void add_own_rows(float (&du)[4][4], float (&dv)[4][4], const Part& part) const {
    for (int step = part.first / 16; step < kFloatChunk / 16; ++step) {
      part.multiply_by_pairs(dv, weights, g, step);
      part.multiply_by_pairs(du, products, y, step);
    }
  }
};

// One block per piece and key head.
template <class T, int kDim>
__global__ void __launch_bounds__(2 * kDim, 128 / kDim)
    float_causal_keys(const __grid_constant__ CausalCall causal) {
  using Shape = FloatCausalKeysShape<T, kDim>;
  LLN_DYNAMIC_SHARED(shared);
  const FloatCausalKeysTiles<T, kDim> tiles(shared);
  const DeviceCall& call = causal.call;
  const CausalPiece piece = find_causal_piece<true>(call);
  if (piece.s < 0) return;
  const FloatCausalPart<T, kDim> part;
  const int channel = 32 * part.slice;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const int group = static_cast<int>(static_cast<std::uint32_t>(call.heads) /
                                     static_cast<std::uint32_t>(call.heads_k));
  T* const dk = piece.keys<T>(call.dk);
  T* const dv = piece.keys<T>(call.dv);
  if (piece.first) {
    zero_rows_before(dk, call.dk.token, piece.sequence.key_first, dim);
    zero_rows_before(dv, call.dv.token, piece.sequence.key_first, dim_v);
  }
  ChannelRows<kDim> sums;
  if (!piece.last) {
    sums.read(causal.behind, (piece.slot + 1) * call.heads + piece.head, dim, dim_v);
  }
  const float beta = scale_at(call.beta, piece.s, piece.head_k);
  LargestFloat largest;
  FloatKeys<T> keys;
  FloatGradientRows<T> rows;
  const int last = (piece.count - 1) / kFloatChunk * kFloatChunk + part.first;
  rows.load(causal, piece, piece.head, last, part.slice);
  for (int row = last; row >= 0; row -= kFloatChunk) {
    keys.load(call, piece, row, part.slice);
    float du[4][4] = {}, dv_acc[4][4] = {};
    for (int head = 0; head < group; ++head) {
      rows.finish(call, piece, piece.head + head, row, part.slice, tiles.deltas);
      part.write_rows(tiles.y, rows.y);
      part.write_rows(tiles.g, rows.g);
      if (head == 0) {
        keys.raise(beta, dim - channel);
        part.write_rows(tiles.eu, keys.k);
        part.write_rows(tiles.v, keys.v);
        write_split_state<Shape::kParts>(tiles.sums, tiles.mass, sums);
      }
      __syncthreads();
      const bool last_head = head + 1 == group;
      if (!last_head || row >= kFloatChunk) {
        rows.load(causal, piece, piece.head + (last_head ? 0 : head + 1),
                  last_head ? row - kFloatChunk : row, part.slice);
      }
      if (head == 0) tiles.add_rows_behind(du, dv_acc, part);
      tiles.write_pairs(part);
      part.meet_group();
      tiles.add_own_rows(du, dv_acc, part);
      add_split_chunk<Shape::kParts>(sums, tiles.y, tiles.g,
                                     [&](int token) { return tiles.deltas[token]; });
      __syncthreads();  // the tiles have been read
    }
    to_direct<32>(dv_acc);
    to_direct<32>(du);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      float& own = du[i % 8 / 2][i / 8 * 2 + i % 2];
      own *= beta * keys.k[0][i / 8][i % 8];
    }
    largest.see(dv_acc);
    largest.see(du);
    store_float_rows<32>(dv + channel, call.dv.token, row, piece.count, dim_v - channel, dv_acc);
    store_float_rows<32>(dk + channel, call.dk.token, row, piece.count, dim - channel, du);
  }
  report_reach(causal, piece, largest.at_most(largest_result<T>(call)));
}

}  // namespace lln::cuda
