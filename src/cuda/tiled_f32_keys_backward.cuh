// The backward pass over keys of LLN in f32: dk = beta Kn (v dC^T - t) and dv = Kn dC with
// Kn = 2^(beta k - c). dC lies in shared memory once, for both products; k, v, dk and dv pass
// through registers alone, k twice.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/split_tiles.cuh"
#include "cuda/tiled_keys_backward.cuh"

namespace lln::cuda {

template <int kDim>
inline constexpr int kFloatKeysBackwardShared = kSplitBytes<kDim, kDim> + 2 * kDim * 4;

// 2^(beta k - c) of 16 rows and 32 channels, whose -c is `added`.
__device__ inline void float_key_weights(float (&k)[2][8], const float* added, float scale) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float& x = k[i / 8][i % 8];
    x = exp2_fast(clamp_keep_nan(x * scale) + added[8 * t + i % 8]);
  }
}

// acc += change(x) * tile, or * tile^T, for 16 rows of a tensor. Rows come 32 channels at a time,
// the next ones under way; the loop stays one, because the compiler would fill registers with what
// later turns need.
template <int kDim, bool kTransposed, class Change>
__device__ inline void multiply_float_rows(float (&acc)[kDim / 8][4], const float* rows,
                                           std::int64_t stride, int first, int end, int dim,
                                           const unsigned char* tile, Change&& change) {
  RowFloats<32> next;
  load_float_rows<32>(next, rows, stride, first, end, dim);
#pragma unroll 1
  for (int group = 0; group < kDim / 32; ++group) {
    float x[2][8];
#pragma unroll
    for (int i = 0; i < 16; ++i) x[i / 8][i % 8] = next[0][i / 8][i % 8];
    const int channel = 32 * (group + 1);
    load_float_rows<32>(next, rows + channel, stride, first, end, dim - channel);
    change(x, group);
    multiply_split_group<kDim, kTransposed>(acc, x, tile, group);
  }
}

// v dC^T becomes dk. Kn is made again from k: registers hold no second tensor.
template <int kDim>
__device__ inline void finish_float_keys(float (&acc)[kDim / 8][4], const float* k,
                                         std::int64_t stride, int first, int end, int dim,
                                         const float* added, const float* t_sums, float beta) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int group = 0; group < kDim / 32; ++group) {
    RowFloats<32> kn;
    load_float_rows<32>(kn, k + 32 * group, stride, first, end, dim - 32 * group);
    float_key_weights(kn[0], added + 32 * group, beta * kLog2E);
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const int half = i / 8, channel = i % 8;
      float& x = acc[4 * group + channel / 2][2 * half + channel % 2];
      x = beta * kn[0][half][channel] * (x - t_sums[32 * group + 8 * t + channel]);
    }
  }
}

// One block per job and key head.
template <int kDim>
__global__ void __launch_bounds__(kKeysBackwardThreads<kDim>, kDim <= 64 ? 3 : 1)
    float_keys_backward(const __grid_constant__ TiledCall tiled) {
  constexpr int kStep = kKeysBackwardThreads<kDim> / 2;  // 16 rows a warp
  LLN_DYNAMIC_SHARED(shared);
  float* const added = reinterpret_cast<float*>(shared + kSplitBytes<kDim, kDim>);
  float* const t_sums = added + kDim;
  const DeviceCall& call = tiled.call;
  const KeyRows rows = key_rows(tiled);
  if (rows.s < 0) return;
  const DeviceSequence& seq = rows.sequence;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const float* const k = rows.rows<float>(call.k);
  const float* const v = rows.rows<float>(call.v);
  float* const dk = rows.rows<float>(call.dk);
  float* const dv = rows.rows<float>(call.dv);
  wait_for_previous();
  let_next_start();
  const float* const c = tiled.state.c_at(rows.s, rows.head);
  const float* const t = tiled.grads.c_at(rows.s, rows.head);
  for (int l = static_cast<int>(threadIdx.x); l < kDim; l += kKeysBackwardThreads<kDim>) {
    added[l] = l < dim ? -c[l] * kLog2E : -INFINITY;
    t_sums[l] = l < dim ? t[l] : 0;
  }
  fill_split_tile<kDim, Columns::direct>(shared, tiled.grads.values_at(rows.s, rows.head),
                                         tiled.grads.row, dim, dim_v);
  const float beta = scale_at(call.beta, rows.s, rows.head);
  __syncthreads();
  for (int row = static_cast<int>(threadIdx.x) / 32 * 16; row < rows.count; row += kStep) {
    float acc[kDim / 8][4] = {};
    multiply_float_rows<kDim, false>(acc, k, call.k.token, row, rows.count, dim, shared,
                                     [&](float(&x)[2][8], int group) {
                                       float_key_weights(x, added + 32 * group, beta * kLog2E);
                                     });
    zero_invalid(acc, call.sequences, seq, rows.begin + row);
    store_float_rows<kDim>(dv, call.dv.token, row, rows.count, dim_v, acc);
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) acc[i / 4][i % 4] = 0;
    multiply_float_rows<kDim, true>(acc, v, call.v.token, row, rows.count, dim_v, shared,
                                    [](float(&)[2][8], int) {});
    finish_float_keys<kDim>(acc, k, call.k.token, row, rows.count, dim, added, t_sums, beta);
    zero_invalid(acc, call.sequences, seq, rows.begin + row);
    store_float_rows<kDim>(dk, call.dk.token, row, rows.count, dim, acc);
  }
}

}  // namespace lln::cuda
