// The backward pass over keys of LLN: Kn = 2^(beta k - c) in registers, dv = Kn dC and
// dk = beta Kn (v dC^T - t). dC and its transpose stay in shared memory; k, v, dk and dv pass
// through registers alone.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/row_source.cuh"
#include "cuda/tiled_call.h"

namespace lln::cuda {

// Wide heads share their matrices among more warps.
template <int kDim>
inline constexpr int kKeysBackwardThreads = kDim <= 64 ? 128 : 256;
template <int kDim, class T>
using KeySource = RowSource<kDim, 2, T>;
template <int kDim>
inline constexpr int kKeysBackwardShared =
    2 * kOperandBytes<kDim, kDim> + 3 * kDim * 4 +
    kKeysBackwardThreads<kDim> / 32 * 2 * KeySource<kDim, Bf16>::kBytes;

// f16 cannot hold weights of one in a million nor sums over as many rows: weights are kept times
// 2^15 (they are at most 1) and dC times a power of two that makes its largest entry about 1.
template <class T>
inline constexpr float kWeightShift = std::is_same_v<T, F16> ? 15 : 0;

// The power of two for dC; the same in all threads. `scratch` holds a float a warp.
__device__ inline float matrix_factor(const float* matrix, std::int64_t row_stride, int rows,
                                      int columns, float* scratch) {
  float top = 0;
  for (int i = static_cast<int>(threadIdx.x); i < rows * columns;
       i += static_cast<int>(blockDim.x)) {
    top = fmaxf(top, fabsf(matrix[i / columns * row_stride + i % columns]));
  }
  for (int step = 16; step > 0; step /= 2) {
    top = fmaxf(top, __shfl_xor_sync(0xFFFFFFFFU, top, step));
  }
  if ((threadIdx.x & 31) == 0) scratch[threadIdx.x >> 5] = top;
  __syncthreads();
  for (int i = 0; i < static_cast<int>(blockDim.x) / 32; ++i) top = fmaxf(top, scratch[i]);
  return top > 0 && top < INFINITY ? exp2f(-floorf(log2f(top))) : 1;
}

// Which keys a job of the last pass takes.
struct KeyRows {
  std::int64_t s = -1, head = 0;
  DeviceSequence sequence;
  std::int64_t begin = 0;  // in the sequence
  int count = 0;

  // The first of them in a tensor of keys.
  template <class T>
  __device__ T* rows(const Rows& tensor) const {
    return static_cast<T*>(tensor.data) + sequence.batch * tensor.batch + head * tensor.head +
           (sequence.k_begin + begin) * tensor.token;
  }
};

__device__ inline KeyRows key_rows(const TiledCall& tiled, std::uint32_t job, std::uint32_t head) {
  const DeviceCall& call = tiled.call;
  KeyRows rows;
  rows.head = head;
  std::int64_t index, piece;
  if (tiled.key_rows_piece_log2 > 0) {
    piece = std::int64_t{1} << tiled.key_rows_piece_log2;
    const auto each = static_cast<std::uint32_t>(
        ((call.sequences.tokens_k - 1) >> tiled.key_rows_piece_log2) + 1);
    rows.s = job / each;
    rows.sequence = sequence_at(call.sequences, rows.s);
    index = job % each;
  } else {
    const JobPlace place = find_job<true>(call.sequences, job);
    rows.s = place.s;
    rows.sequence = place.sequence;
    index = place.index;
    piece = call.sequences.k_jobs.piece(rows.sequence.k_tokens);
  }
  rows.begin = index * piece;
  rows.count = static_cast<int>(min(piece, rows.sequence.k_tokens - rows.begin));
  return rows;
}

// One block per job and key head.
__device__ inline KeyRows key_rows(const TiledCall& tiled) {
  const auto heads = static_cast<std::uint32_t>(tiled.call.heads_k);
  return key_rows(tiled, blockIdx.x / heads, blockIdx.x % heads);
}

// Kn of 16 keys, packed, up to the factors that are folded into matrices: 2^(beta k), and only
// where c is not moderate 2^(beta k - c).
template <class T, int kDim>
__device__ inline void key_weights(RowWords<kDim>& k, const float* added, float scale,
                                   bool folded) {
  const int t = threadIdx.x & 3;
  if (folded) {
#pragma unroll
    for (int group = 0; group < kDim / 32; ++group) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const float2 pair = unpack<T>(k[group][i / 4][i % 4]);
        k[group][i / 4][i % 4] = pack<T>(exp2_fast(pair.x * scale), exp2_fast(pair.y * scale));
      }
    }
    return;
  }
#pragma unroll
  for (int group = 0; group < kDim / 32; ++group) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float2 pair = unpack<T>(k[group][i / 4][i % 4]);
      const float* const x = added + 32 * group + 8 * t + 2 * (i % 4);
      k[group][i / 4][i % 4] = pack<T>(exp2_fast(clamp_keep_nan(pair.x * scale) + x[0]),
                                       exp2_fast(clamp_keep_nan(pair.y * scale) + x[1]));
    }
  }
}

// c within this is folded into dC: 2^(beta k) <= 2^c and 2^-c are then far from the ends of bf16.
inline constexpr float kModerateExponent = 60;

// What channels bring to the products of keys: to the exponents of Kn (`added`), into dC
// (`factors`), and t with its factor and `times`. Returns whether c is folded. All threads of the
// block take part, and must meet before any of it is read.
template <class T, int kDim, int kThreads>
__device__ inline bool fill_key_channels(float* added, float* factors, float* t_sums,
                                         const float* c, const float* t, float times, int dim) {
  bool moderate = true;
  for (int l = static_cast<int>(threadIdx.x) & 31; l < dim; l += 32) {
    moderate = moderate && fabsf(c[l] * kLog2E) <= kModerateExponent;
  }
  const bool folded = std::is_same_v<T, Bf16> && __all_sync(0xFFFFFFFFU, moderate);
  for (int l = static_cast<int>(threadIdx.x); l < kDim; l += kThreads) {
    const float x = l < dim ? kWeightShift<T> - c[l] * kLog2E : -INFINITY;
    added[l] = folded ? 0 : x;
    factors[l] = l >= dim ? 0 : folded ? exp2f(x) : 1;
    t_sums[l] = l < dim ? times * t[l] * factors[l] : 0;
  }
  return folded;
}

template <int kCount>
__device__ inline void zero_rows(float (&acc)[kCount][4], const bool (&valid)[2]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[n][i] = valid[i >> 1] ? acc[n][i] : 0;
  }
}

// Keys that do not count have zero gradients, whatever they hold: rows key + g and + 8.
template <int kCount>
__device__ inline void zero_invalid(float (&acc)[kCount][4], const Sequences& sequences,
                                    const DeviceSequence& sequence, std::int64_t key) {
  const int g = (threadIdx.x & 31) >> 2;
  const bool valid[2] = {key_valid(sequences, sequence, key + g),
                         key_valid(sequences, sequence, key + g + 8)};
  if (!__all_sync(0xFFFFFFFFU, valid[0] && valid[1])) zero_rows(acc, valid);
}

// What the keys of a block are multiplied with.
template <class T, int kDim>
struct KeyGradients {
  const uint4 *dc, *dc_transposed;
  const float *added, *t_sums;
  const Sequences& sequences;
  const DeviceSequence& sequence;
  std::int64_t begin;
  float scale, shift, unfactor;
  bool folded;

  // k becomes Kn.
  __device__ void of_values(float (&acc)[kDim / 8][4], RowWords<kDim>& k, int row) const {
    key_weights<T, kDim>(k, added, scale, folded);
    multiply<T, kDim, kDim>(acc, k, dc);
    if constexpr (kWeightShift<T> != 0) {
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] *= shift * unfactor;
      }
    }
    zero_invalid(acc, sequences, sequence, begin + row);
  }

  __device__ void of_keys(float (&acc)[kDim / 8][4], const RowWords<kDim>& kn,
                          const RowWords<kDim>& v, int row) const {
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[n][i] = 0;
    }
    multiply<T, kDim, kDim>(acc, v, dc_transposed);
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int group = 0; group < kDim / 32; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 sum = *reinterpret_cast<const float2*>(t_sums + 32 * group + 8 * t + 2 * i);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 weight = unpack<T>(kn[group][half][i]);
          float* const x = acc[4 * group + i] + 2 * half;
          x[0] = shift * weight.x * (x[0] * unfactor - sum.x);
          x[1] = shift * weight.y * (x[1] * unfactor - sum.y);
        }
      }
    }
    zero_invalid(acc, sequences, sequence, begin + row);
  }
};

template <class T, int kDim>
__global__ void __launch_bounds__(kKeysBackwardThreads<kDim>, kDim <= 64 ? 4 : 1)
    keys_backward(const __grid_constant__ TiledCall tiled) {
  constexpr int kWarps = kKeysBackwardThreads<kDim> / 32;
  LLN_DYNAMIC_SHARED(shared);
  uint4* const dc = reinterpret_cast<uint4*>(shared);
  uint4* const dc_transposed = dc + kOperandBytes<kDim, kDim> / 16;
  float* const added = reinterpret_cast<float*>(shared + 2 * kOperandBytes<kDim, kDim>);
  float* const factors = added + kDim;
  float* const t_sums = factors + kDim;
  const DeviceCall& call = tiled.call;
  const KeyRows rows = key_rows(tiled);
  if (rows.s < 0) return;
  const DeviceSequence& seq = rows.sequence;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const T* const k = rows.rows<T>(call.k);
  const T* const v = rows.rows<T>(call.v);
  T* const dk = rows.rows<T>(call.dk);
  T* const dv = rows.rows<T>(call.dv);
  constexpr int kStep = 16 * kWarps;
  using Source = KeySource<kDim, T>;
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  unsigned char* const rings =
      reinterpret_cast<unsigned char*>(t_sums + kDim) + 2 * warp * Source::kBytes;
  Source k_rows(rings, k, call.k.token, 16 * warp, kStep, rows.count, dim);
  Source v_rows(rings + Source::kBytes, v, call.v.token, 16 * warp, kStep, rows.count, dim_v);
  wait_for_previous();
  let_next_start();
  const float* const sums = tiled.grads.values_at(rows.s, rows.head);
  const OperandFill<T, kDim, kDim, kKeysBackwardThreads<kDim>> fill(sums, tiled.grads.row, dim,
                                                                    dim_v);
  float factor = 1;
  if constexpr (std::is_same_v<T, F16>) {
    factor = matrix_factor(sums, tiled.grads.row, dim, dim_v, added);
    __syncthreads();
  }
  const float* const c = tiled.state.c_at(rows.s, rows.head);
  const float* const t = tiled.grads.c_at(rows.s, rows.head);
  const float beta = scale_at(call.beta, rows.s, rows.head);
  const bool folded = fill_key_channels<T, kDim, kKeysBackwardThreads<kDim>>(added, factors, t_sums,
                                                                             c, t, beta, dim);
  __syncthreads();
  fill.template write<Columns::direct>(dc, [&](int l, int) { return factors[l] * factor; });
  fill_operand_transposed<T, kDim, kDim, Columns::direct>(
      dc_transposed, sums, tiled.grads.row, dim_v, dim,
      [&](int, int l) { return beta * factors[l] * factor; });
  const float shift = kWeightShift<T> == 0 ? 1 : exp2f(-kWeightShift<T>);
  const float unfactor = kWeightShift<T> == 0 ? 1 : 1 / factor;
  __syncthreads();
  const KeyGradients<T, kDim> gradients{dc,    dc_transposed, added,         t_sums, call.sequences,
                                        seq,   rows.begin,    beta * kLog2E, shift,  unfactor,
                                        folded};
  for (int row = 16 * warp; row < rows.count; row += kStep) {
    RowWords<kDim> kn, values;
    k_rows.take(kn);
    v_rows.take(values);
    float acc[kDim / 8][4] = {};
    gradients.of_values(acc, kn, row);
    store_rows<kDim>(dv, call.dv.token, row, rows.count, dim_v, acc);
    gradients.of_keys(acc, kn, values, row);
    store_rows<kDim>(dk, call.dk.token, row, rows.count, dim, acc);
  }
}

}  // namespace lln::cuda
