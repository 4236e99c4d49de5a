// The pass over keys that finds the state before every piece, where sequences have several: shared
// by the forward and the backward walks.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_causal_chunks.cuh"
#include "cuda/tiled_launch.cuh"

namespace lln::cuda {

inline constexpr int kSumStages = 3;

// K and s of the keys of each piece but the last, for the piece behind it. One block per piece and
// key head.
template <int kDim>
__global__ void __launch_bounds__(2 * kDim, kDim == 64 ? 4 : 2)
    causal_key_sums(const __grid_constant__ CausalCall causal) {
  extern __shared__ __align__(128) unsigned char shared[];
  const DeviceCall& call = causal.call;
  const CausalPiece piece = find_causal_piece<true>(call);
  if (piece.s < 0 || piece.last) return;
  const KeyChunks<kDim> keys(call, piece);
  const KeyWalk<Bf16, kDim, kDim, kSumStages> walk{
      call.sequences, piece.sequence, shared,
      keys.k,         keys.v,         keys.k_stride,
      keys.v_stride,  piece.begin,    keys.count,
      keys.dim,       keys.dim_v,     scale_at(call.beta, piece.s, piece.head_k) * kLog2E};
  PlainSums<kDim> sums;
  walk.add_all(sums);
  ChannelRows<kDim> rows;
#pragma unroll
  for (int i = 0; i < 4; ++i) rows.mass[i] = sums.s[i];
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) rows.values[n][i] = sums.values[n][i];
  }
  rows.write(causal.before, (piece.slot + 1) * call.heads_k + piece.head_k, keys.dim, keys.dim_v);
}

template <int kDim>
void launch_before(const CausalCall& causal, const CausalPlan& plan) {
  launch("causal_key_sums", causal_key_sums<kDim>, plan.jobs * causal.call.heads_k, 2 * kDim,
         kSumStages * 2 * CausalShape<kDim>::kTileBytes, plan.stream, causal);
  launch_join_before(causal, plan);
}

}  // namespace lln::cuda
