// What the launches of the forward and the backward walks share: the choice among their forms, and
// the pass over keys that finds the state before every piece, where sequences have several.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_causal_chunks.cuh"
#include "cuda/tiled_launch.cuh"

namespace lln::cuda {

// `launches`: of both widths, each without and with diagonal blocks.
inline void launch_by_form(const CausalCall& causal, const CausalPlan& plan,
                           const CausalLaunch (&launches)[2][2]) {
  const int width = plan.width == 64 ? 0 : 1, diag = causal.call.kind == Kind::lln_diag ? 1 : 0;
  launches[width][diag](causal, plan);
}

inline constexpr int kSumStages = 3;

// K and s of the keys of each piece but the last, for the piece behind it. From the last chunk to
// the first: a walk that follows finds the first ones in the cache. One block per piece and key
// head.
template <int kDim>
__global__ void __launch_bounds__(2 * kDim, kDim == 64 ? 4 : 2)
    causal_key_sums(const __grid_constant__ CausalCall causal) {
  constexpr int kTileBytes = CausalShape<kDim>::kTileBytes;
  LLN_DYNAMIC_SHARED(shared);
  const DeviceCall& call = causal.call;
  const CausalPiece piece = find_causal_piece<true>(call);
  if (piece.s < 0 || piece.last) return;
  const KeyChunks<kDim> keys(call, piece);
  const float scale = scale_at(call.beta, piece.s, piece.head_k) * kLog2E;
  const int chunks = (keys.count + kChunk - 1) / kChunk;
  const auto stage = [&](int i) { return shared + i % kSumStages * 2 * kTileBytes; };
  const auto first = [&](int i) { return (chunks - 1 - i) * kChunk; };
  const auto start = [&](int i) {
    if (i < chunks) keys.copy(stage(i), stage(i) + kTileBytes, first(i));
    copy_commit();
  };
  for (int i = 0; i < kSumStages - 1; ++i) start(i);
  PlainSums<kDim> sums;
  for (int i = 0; i < chunks; ++i) {
    copy_wait<kSumStages - 2>();
    __syncthreads();
    start(i + kSumStages - 1);
    const std::uint64_t valid = keys.valid(first(i));
    if (keys.masked(valid)) clear_masked<kDim>(stage(i), stage(i) + kTileBytes, valid);
    add_keys<Bf16, kDim, kDim>(sums, stage(i), stage(i) + kTileBytes, scale, valid);
  }
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
