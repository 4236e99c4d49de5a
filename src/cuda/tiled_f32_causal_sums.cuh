// Sums over the tokens of a piece, where sequences have several: K and s of its keys for the piece
// behind it, or G and T of its rows for those before it (tiled_f32_causal_keys.cuh).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_f32_causal_tiles.cuh"

namespace lln::cuda {

// 16 tokens and 32 channels of the rows of one query head, and what the walk over rows has left of
// each: Y = 2^(alpha q) / mass, g with its weight, delta. Zeros past the piece's last row.
template <class T>
struct FloatGradientRows {
  RowFloats<32> y, g;
  float inverse[2], delta[2];

  __device__ void load(const CausalCall& causal, const CausalPiece& piece, std::int64_t head,
                       int first, int slice) {
    const DeviceCall& call = causal.call;
    const int channel = 32 * slice, row = first + (static_cast<int>(threadIdx.x) & 31) / 4;
    CausalPiece own = piece;
    own.head = head;
    load_float_rows<32>(y, own.rows<const T>(call.q) + channel, call.q.token, first, piece.count,
                        static_cast<int>(call.dim) - channel);
    load_float_rows<32>(g, own.rows<const T>(call.g) + channel, call.g.token, first, piece.count,
                        static_cast<int>(call.dim_v) - channel);
    const std::int64_t at = statistics_at(causal, piece, head) + row;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const bool there = row + 8 * half < piece.count;
      inverse[half] = there ? causal.inverse[at + 8 * half] : 0;
      delta[half] = there ? causal.delta[at + 8 * half] : 0;
    }
  }

  // q becomes Y, and g gets its weight; delta goes to deltas[row of the chunk].
  __device__ void finish(const DeviceCall& call, const CausalPiece& piece, std::int64_t head,
                         int first, int slice, float* deltas) {
    const float scale = scale_at(call.alpha, piece.s, head) * kLog2E;
    query_exponentials(y, scale, call, 32 * slice);
#pragma unroll
    for (int i = 0; i < 16; ++i) y[0][i / 8][i % 8] *= inverse[i / 8];
    weigh_causal_rows(g, call, piece, head, first, slice);
    const int lane = threadIdx.x & 31;
    if (slice != 0 || (lane & 3) != 0) return;
    float* const to = deltas + first % kFloatChunk + (lane >> 2);
    to[0] = delta[0];
    to[8] = delta[1];
  }
};

template <class T, int kDim>
inline constexpr int kFloatCausalSumsShared =
    2 * FloatCausalShape<T, kDim>::kTileBytes + kFloatChunk * 4;

// Of the keys of each piece but the last. One block per piece and key head.
template <class T, int kDim>
__global__ void __launch_bounds__(2 * kDim, kDim == 128 ? 1 : 192 / kDim)
    float_causal_key_sums(const __grid_constant__ CausalCall causal) {
  using Shape = FloatCausalShape<T, kDim>;
  LLN_DYNAMIC_SHARED(shared);
  const DeviceCall& call = causal.call;
  const CausalPiece piece = find_causal_piece<true>(call);
  if (piece.s < 0 || piece.last) return;
  const FloatCausalPart<T, kDim> part;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const float beta = scale_at(call.beta, piece.s, piece.head_k);
  ChannelRows<kDim> sums;
  FloatKeys<T> keys;
  keys.load(call, piece, part.first, part.slice);
  for (int row = part.first; row - part.first < piece.count; row += kFloatChunk) {
    keys.raise(beta, dim - 32 * part.slice);
    part.write_rows(shared, keys.k);
    part.write_rows(shared + Shape::kTileBytes, keys.v);
    __syncthreads();
    keys.load(call, piece, row + kFloatChunk, part.slice);
    add_split_chunk<Shape::kParts>(sums, shared, shared + Shape::kTileBytes,
                                   [](int) { return 1.0F; });
    __syncthreads();  // the tiles have been read
  }
  sums.write(causal.before, (piece.slot + 1) * call.heads_k + piece.head_k, dim, dim_v);
}

// Of the rows of each piece but the first. One block per piece and query head.
template <class T, int kDim>
__global__ void __launch_bounds__(2 * kDim, kDim == 128 ? 1 : 192 / kDim)
    float_causal_row_sums(const __grid_constant__ CausalCall causal) {
  using Shape = FloatCausalShape<T, kDim>;
  LLN_DYNAMIC_SHARED(shared);
  unsigned char* const g_tile = shared + Shape::kTileBytes;
  float* const deltas = reinterpret_cast<float*>(g_tile + Shape::kTileBytes);
  const DeviceCall& call = causal.call;
  const CausalPiece piece = find_causal_piece<false>(call);
  if (piece.s < 0 || piece.first) return;
  const FloatCausalPart<T, kDim> part;
  ChannelRows<kDim> sums;
  FloatGradientRows<T> rows;
  rows.load(causal, piece, piece.head, part.first, part.slice);
  for (int row = part.first; row - part.first < piece.count; row += kFloatChunk) {
    rows.finish(call, piece, piece.head, row, part.slice, deltas);
    part.write_rows(shared, rows.y);
    part.write_rows(g_tile, rows.g);
    __syncthreads();
    rows.load(causal, piece, piece.head, row + kFloatChunk, part.slice);
    add_split_chunk<Shape::kParts>(sums, shared, g_tile,
                                   [deltas](int token) { return deltas[token]; });
    __syncthreads();  // the tiles have been read
  }
  sums.write(causal.behind, piece.slot * call.heads + piece.head, static_cast<int>(call.dim),
             static_cast<int>(call.dim_v));
}

}  // namespace lln::cuda
