// The forward pass of LLN in f32: the passes of tiled_keys.cuh and tiled_rows.cuh with products of
// split_mma.cuh. Maxima are always taken off: f32 rows leave twice the time for arithmetic.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/split_mma.cuh"
#include "cuda/tiled_keys.cuh"
#include "cuda/tiled_rows_backward.cuh"

namespace lln::cuda {

template <int kDim>
struct FloatKeysShape {
  static constexpr int kThreads = 2 * kDim;
  static constexpr int kTile = kDim <= 64 ? 64 : 32;  // tokens
  // Rows of k are read by channel: this many floats apart, a warp's 32 reads meet in no bank.
  static constexpr int kKeyRow = kDim + 4;
  static constexpr int kStage = kTile * (kKeyRow + kDim) * 4;
  static constexpr int kPart = kTile * kDim * 2;  // a third of v, bf16
  static constexpr int kStages = 2;
  static constexpr int kShared = kStages * kStage + 3 * kPart;
};

// k and v of one piece on their way through shared memory.
template <int kDim>
struct FloatKeyWalk {
  using Shape = FloatKeysShape<kDim>;

  const Sequences& sequences;
  const DeviceSequence& sequence;
  unsigned char* shared;
  const float *k, *v;
  std::int64_t k_stride, v_stride, begin;
  int count, dim, dim_v;

  __device__ bool valid(int key) const {
    return key < count &&
           (sequences.mask == nullptr || key_valid(sequences, sequence, begin + key));
  }
  __device__ float* keys(int tile) const {
    return reinterpret_cast<float*>(shared + tile % Shape::kStages * Shape::kStage);
  }
  __device__ float* values(int tile) const { return keys(tile) + Shape::kTile * Shape::kKeyRow; }

  __device__ void start(int tile) const {
    constexpr int kPieces = kDim / 4;
    if (tile * Shape::kTile < count) {
      for (int i = static_cast<int>(threadIdx.x); i < Shape::kTile * kPieces;
           i += Shape::kThreads) {
        const int row = i / kPieces, channel = i % kPieces * 4, key = tile * Shape::kTile + row;
        const bool there = valid(key);
        copy_async(shared_address(keys(tile) + row * Shape::kKeyRow + channel),
                   there && channel < dim ? k + key * k_stride + channel : k,
                   there && channel < dim);
        copy_async(shared_address(values(tile) + row * kDim + channel),
                   there && channel < dim_v ? v + key * v_stride + channel : v,
                   there && channel < dim_v);
      }
    }
    copy_commit();
  }

  // v of a tile as three tiles of bf16.
  __device__ void split_values(int tile, unsigned char* parts) const {
    constexpr int kPieces = kDim / 4;
    for (int i = static_cast<int>(threadIdx.x); i < Shape::kTile * kPieces; i += Shape::kThreads) {
      const int row = i / kPieces, channel = i % kPieces * 4;
      const float4 x = *reinterpret_cast<const float4*>(values(tile) + row * kDim + channel);
      const Split low = split(x.x, x.y), high = split(x.z, x.w);
      const std::uint32_t at = tile_offset<kDim>(row, channel / 8) + channel % 8 * 2;
#pragma unroll
      for (int part = 0; part < 3; ++part) {
        *reinterpret_cast<uint2*>(parts + part * Shape::kPart + at) = {low.part[part],
                                                                       high.part[part]};
      }
    }
  }
};

// Adds a tile: this warp's 16 channels of k, and v in three parts.
template <int kDim>
__device__ inline void add_float_keys(ChannelSums<kDim>& sums, const float* k_tile,
                                      const unsigned char* v_parts, float scale,
                                      std::uint64_t valid) {
  using Shape = FloatKeysShape<kDim>;
  constexpr int kSteps = Shape::kTile / 16;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp = threadIdx.x >> 5;
  float x[kSteps][4][2];
  float top[2] = {kNoExponent, kNoExponent};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int token = 16 * step + 8 * (i >> 1) + 2 * t + e;
        const float k = k_tile[token * Shape::kKeyRow + 16 * warp + g + 8 * (i & 1)];
        x[step][i][e] = ((valid >> token) & 1) != 0 ? clamp_keep_nan(k * scale) : -INFINITY;
        top[i & 1] = fmaxf(top[i & 1], x[step][i][e]);
      }
    }
  }
  top[0] = quad_max(top[0]);
  top[1] = quad_max(top[1]);
  sums.raise(top);
  const std::uint32_t base = shared_address(v_parts);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    Split a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float e0 = exp2_fast(x[step][i][0] - sums.m[i & 1]);
      const float e1 = exp2_fast(x[step][i][1] - sums.m[i & 1]);
      sums.s[i & 1] += e0 + e1;
      a[i] = split(e0, e1);
    }
    const int row = 16 * step + ((lane >> 3) & 1) * 8 + (lane & 7);
#pragma unroll
    for (int n = 0; n < kDim / 16; ++n) {
      std::uint32_t b[3][4];
#pragma unroll
      for (int part = 0; part < 3; ++part) {
        load_transposed(b[part],
                        base + part * Shape::kPart + tile_offset<kDim>(row, 2 * n + (lane >> 4)));
      }
      mma_split(sums.values[2 * n], a, b, 0);
      mma_split(sums.values[2 * n + 1], a, b, 2);
    }
  }
}

// One block per key job and key head.
template <int kDim>
__global__ void __launch_bounds__(2 * kDim, kDim <= 64 ? 2 : 1)
    float_key_sums(const __grid_constant__ TiledCall tiled, bool whole) {
  using Shape = FloatKeysShape<kDim>;
  LLN_DYNAMIC_SHARED(shared);
  wait_for_previous();
  let_next_start();
  const DeviceCall& call = tiled.call;
  const auto heads = static_cast<std::uint32_t>(call.heads_k);
  const std::int64_t slot = blockIdx.x, head = blockIdx.x % heads;
  const JobPlace place = find_key_piece(tiled, blockIdx.x / heads);
  if (place.s < 0) return;
  const DeviceSequence& seq = place.sequence;
  const std::int64_t piece = call.sequences.k_jobs.piece(seq.key_end - seq.key_first);
  const std::int64_t begin = seq.key_first + place.index * piece;
  const auto rows_of = [&](const Rows& rows) {
    return static_cast<const float*>(rows.data) + seq.batch * rows.batch + head * rows.head +
           (seq.k_begin + begin) * rows.token;
  };
  const FloatKeyWalk<kDim> walk{call.sequences,
                                seq,
                                shared,
                                rows_of(call.k),
                                rows_of(call.v),
                                call.k.token,
                                call.v.token,
                                begin,
                                static_cast<int>(min(piece, seq.key_end - begin)),
                                static_cast<int>(call.dim),
                                static_cast<int>(call.dim_v)};
  const float scale = scale_at(call.beta, place.s, head) * kLog2E;
  unsigned char* const parts = shared + Shape::kStages * Shape::kStage;
  ChannelSums<kDim> sums;
  walk.start(0);
  for (int tile = 0; tile * Shape::kTile < walk.count; ++tile) {
    walk.start(tile + 1);
    copy_wait<1>();
    __syncthreads();
    walk.split_values(tile, parts);
    __syncthreads();
    const std::int64_t first = begin + std::int64_t{tile} * Shape::kTile;
    add_float_keys<kDim>(sums, walk.keys(tile), parts, scale,
                         valid_keys(call.sequences, seq, first, begin + walk.count));
    __syncthreads();
  }
  write_key_sums(tiled, sums, place.s, head, slot, 0, whole);
}

// e of 16 rows, 2^(a + c - top), with the largest exponents and the sums.
template <int kDim>
__device__ inline void float_weights(RowFloats<kDim>& x, const float* c, float scale,
                                     float (&tops)[2], float (&sums)[2]) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float top = -kLargestExponent;
#pragma unroll
    for (int group = 0; group < kDim / 32; ++group) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& own = x[group][half][i];
        own = clamp_keep_nan(own * scale) + c[32 * group + 8 * t + i];
        top = fmaxf(top, own);
      }
    }
    top = quad_max(top);
    float sum = 0;
#pragma unroll
    for (int group = 0; group < kDim / 32; ++group) {
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        x[group][half][i] = exp2_fast(x[group][half][i] - top);
        sum += x[group][half][i];
      }
    }
    tops[half] = top;
    sums[half] = quad_sum(sum);
  }
}

template <int kDim>
inline constexpr int kFloatRowsShared = 3 * kOperandBytes<kDim, kDim> + kDim * 4;

template <int kDim>
__global__ void __launch_bounds__(kRowsThreads, kDim <= 64 ? 3 : 2)
    float_rows_forward(const __grid_constant__ TiledCall tiled) {
  constexpr int kStep = 16 * kRowsWarps;
  LLN_DYNAMIC_SHARED(shared);
  uint4* const operand = reinterpret_cast<uint4*>(shared);
  float* const exponents = reinterpret_cast<float*>(shared + 3 * kOperandBytes<kDim, kDim>);
  const DeviceCall& call = tiled.call;
  const RowPiece piece = find_rows(call, blockIdx.x);
  if (piece.s < 0) return;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const float* const q = piece.rows<float>(call.q);
  float* const o = piece.rows<float>(call.o);
  const int first = 16 * (static_cast<int>(threadIdx.x) >> 5);
  RowFloats<kDim> next;
  load_float_rows<kDim>(next, q, call.q.token, first, piece.count, dim);
  wait_for_previous();
  let_next_start();
  const float* const c = tiled.state.c_at(piece.s, piece.head_k);
  for (int l = static_cast<int>(threadIdx.x); l < kDim; l += kRowsThreads) {
    exponents[l] = l < call.channels ? c[l] * kLog2E : -INFINITY;
  }
  fill_split_operand<kDim, kDim>(
      operand, tiled.state.values_at(piece.s, piece.head_k), tiled.state.row, dim, dim_v,
      [&](int column) { return channel_factor(call.lln_weight, piece.head, column); });
  const RowFactor factor = row_factor(call.lln_weight, piece.sequence, piece.head);
  const float scale = scale_at(call.alpha, piece.s, piece.head) * kLog2E;
  __syncthreads();
  for (int row = first; row < piece.count; row += kStep) {
    RowFloats<kDim> e;
#pragma unroll
    for (int i = 0; i < kDim / 2; ++i) e[i / 16][i / 8 % 2][i % 8] = next[i / 16][i / 8 % 2][i % 8];
    load_float_rows<kDim>(next, q, call.q.token, row + kStep, piece.count, dim);
    float top[2], sum[2];
    float_weights<kDim>(e, exponents, scale, top, sum);
    const int own = row + (static_cast<int>(threadIdx.x) & 31) / 4, last = piece.count - 1;
    const float inverse[2] = {inverse_of(sum[0]) * factor(piece.begin + min(own, last)),
                              inverse_of(sum[1]) * factor(piece.begin + min(own + 8, last))};
    float acc[kDim / 8][4] = {};
    multiply_split<kDim, kDim>(acc, e, operand);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[n][i] *= inverse[i >> 1];
    }
    store_float_rows<kDim>(o, call.o.token, row, piece.count, dim_v, acc);
  }
}

}  // namespace lln::cuda
