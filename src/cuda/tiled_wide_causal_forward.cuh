// The rows of causal LLN for 129 to 256 channels, by the formulas of tiled_causal_forward.cuh. With
// K and s of the keys before a piece, Ea = 2^(alpha q), Eu = 2^(beta k), rounded to bf16, and
// S = tril(Ea Eu^T),
//   o = (Ea K + S v) / (Ea s + S 1).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_wide_causal_walk.cuh"

namespace lln::cuda {

struct WideCausalForward {
  static constexpr bool kTransposed = false, kUpTo = true, kLast = false;

  const DeviceCall& call;
  const CausalPiece& piece;
  const WideCausalKeys& keys;
  const float* mass_before;  // s of the keys before the piece; null: there are none
  float* state_masses;       // of the block's rows: Ea s
  float scale;
  int tile, partners, columns, depth;
  float mass[2][4] = {};  // S 1 of rows g and g + 8 in [0] and [2]
  Largest largest_q, largest_k;

  __device__ void copy_own(unsigned char* to) const {
    const int count = piece.count;
    copy_wide_tokens(to, piece.rows<const Bf16>(call.q), call.q.token, tile * kChunk, depth,
                     [=](int row) { return row < count; });
  }
  // A warp has whole rows.
  __device__ void arrived_own(unsigned char* q_tile) {
    const bool inside = wide_channel() < depth;
    float s[8] = {};
    if (mass_before != nullptr && inside) {
#pragma unroll
      for (int i = 0; i < 8; ++i) s[i] = mass_before[wide_channel() + i];
    }
    each_own_piece(q_tile, [&](int row, uint4& words) {
      see(largest_q, words);
      words = row_exponentials(words, scale, call.channels - wide_channel());
      const std::uint32_t x[4] = {words.x, words.y, words.z, words.w};
      float sum = 0;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 e = unpack<Bf16>(x[i]);
        sum = fmaf(e.x, s[2 * i], fmaf(e.y, s[2 * i + 1], sum));
      }
#pragma unroll
      for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(0xFFFFFFFFU, sum, lanes);
      if ((threadIdx.x & 31) == 0) state_masses[row] = sum;
    });
  }
  __device__ void copy_first(unsigned char* to, int partner) const { keys.copy_k(to, partner); }
  __device__ void arrived_first(unsigned char* k_tile, int partner) {
    keys.raise(k_tile, partner, largest_k, [](const uint4&) {});
  }
  __device__ void copy_second(unsigned char* to, int partner) const { keys.copy_v(to, partner); }
  __device__ void arrived_second(unsigned char*, int) const {}
  __device__ void copy_last(unsigned char*) const {}
  __device__ void pairs(float (&)[2][2][4], int, int) const {}
  __device__ bool diagonal(int partner) const { return partner == tile; }
  // Sums of the rounded numbers that v is multiplied with.
  __device__ void pairs_written(const unsigned char* pairs, int first) {
    const std::uint32_t ones = pack<Bf16>(1, 1);
#pragma unroll
    for (int i = 0; i < 2 * kChunk / 16; ++i) {
      std::uint32_t y[4];
      load_left<kChunk>(y, pairs, first + i % 2 * 16, i / 2);
      mma(mass[i % 2], y, ones, ones);
    }
  }
};

// One block for 64 rows of a query head.
__global__ void __launch_bounds__(WideCausalShape::kThreads, 2)
    wide_causal_forward(const __grid_constant__ WideCausalCall wide) {
  LLN_DYNAMIC_SHARED(bytes);
  auto& shared = *reinterpret_cast<WideCausalShared*>(bytes);
  const DeviceCall& call = wide.causal.call;
  const WideCausalTile at;
  if (!share_piece(shared, find_causal_piece<false, kWideCausalPieceLog2>(call, at.piece),
                   at.tile)) {
    return;
  }
  const CausalPiece& piece = shared.piece;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  Bf16* const o = piece.rows<Bf16>(call.o);
  if (piece.first && at.tile == 0) {
    zero_rows_before(o, call.o.token, piece.sequence.key_first, dim_v);
  }
  const WideCausalKeys keys(call, piece);
  const std::int64_t slot = piece.slot * call.heads_k + piece.head_k;
  const float alpha = scale_at(call.alpha, piece.s, piece.head) * kLog2E;
  WideCausalForward parts{call,
                          piece,
                          keys,
                          piece.first ? nullptr : wide.masses + slot * dim,
                          shared.rows[0][0],
                          alpha,
                          at.tile,
                          at.tile + 1,
                          dim_v,
                          dim};
  const WideCausalMatrix matrix(wide, slot, !piece.first);
  WideCausalSums acc = {};
  multiply_wide_causal(parts, matrix, shared, acc);
  const WideCausalWarp warp;
  Largest largest_o;
#pragma unroll
  for (int band = 0; band < WideCausalShape::kBands; ++band) {
    const int row = warp.first + 16 * band;
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = row + static_cast<int>(threadIdx.x & 31) / 4 + 8 * half;
      const float mass = parts.state_masses[own] + parts.mass[band][2 * half];
      inverse[half] = mass == 0 ? 0 : 1 / mass;
    }
#pragma unroll
    for (int i = 0; i < WideCausalShape::kColumns / 2; ++i) {
      acc[band][i / 4][i % 4] *= inverse[i / 2 % 2];
    }
    store_natural(o, call.o.token, at.tile * kChunk + row, piece.count, warp.column(), dim_v,
                  acc[band], largest_o);
  }
  report_reach(wide.causal, piece,
               parts.largest_q.at_most(kLargestModerate / fabsf(alpha)) &&
                   parts.largest_k.at_most(kLargestModerate / fabsf(keys.scale)) &&
                   largest_o.at_most(kLargestBf16));
}

}  // namespace lln::cuda
