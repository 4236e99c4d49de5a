// The backward pass over rows of LLN in f32: dq, and for each piece of a sequence dC = W^T g and
// t = W^T delta. Warps share 16 rows, 32 channels each, and exchange what a row's sums are made of;
// then each takes 16 channels for the sums over rows, which it reads transposed from shared memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/split_tiles.cuh"
#include "cuda/tiled_f32.cuh"

namespace lln::cuda {

// What 32 channels add to the sums of a row, with their own reference exponent.
struct RowShare {
  float top, mass, dot, unused;
};

template <int kDim>
struct FloatRowsBackwardShape {
  static constexpr int kThreads = 2 * kDim;
  static constexpr int kTile = 32;           // rows, in two groups of 16
  static constexpr int kSlices = kDim / 32;  // of channels: the warps that share a group
  static constexpr int kTileBytes = kSplitBytes<kTile, kDim>;
  static constexpr int kValueBytes = kSplitBytes<kDim, kDim>;
  static constexpr int kShareBytes = kTile * kSlices * static_cast<int>(sizeof(RowShare));
  static constexpr int kShared = kValueBytes + 2 * kTileBytes + kShareBytes + kDim * 4;
};

// Where a warp's part of a tile lies in shared memory.
template <int kDim>
struct FloatRowsTile {
  using Shape = FloatRowsBackwardShape<kDim>;

  const unsigned char* values;  // C, channels in direct order
  unsigned char *g, *weights;   // [row, column]
  RowShare* shares;             // [row, slice]
  int first, slice;             // of this warp's rows and channels

  // The warps that share this one's rows.
  __device__ void meet_group() const { meet(1 + first / 16, kDim); }

  // dW = g C^T.
  __device__ void multiply(float (&dw)[4][4]) const {
    multiply_split_rows<Shape::kTile, kDim, true>(dw, g, first, values, 4 * slice);
  }

  // The sums of e and e dW over all channels of a row: what e is to be multiplied with for W, and
  // delta.
  __device__ void exchange(const RowFloats<32>& e, const float (&dw)[4][4], const float (&top)[2],
                           const float (&mass)[2], float (&weight)[2], float (&delta)[2]) const {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float dot = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) dot = fmaf(e[0][half][i], dw[i / 2][2 * half + i % 2], dot);
      dot = quad_sum(dot);
      RowShare* const own = shares + (first + (lane >> 2) + 8 * half) * Shape::kSlices + slice;
      if ((lane & 3) == 0) *reinterpret_cast<float4*>(own) = {top[half], mass[half], dot, 0};
    }
    meet_group();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const RowShare* const all = shares + (first + (lane >> 2) + 8 * half) * Shape::kSlices;
      float largest = all[0].top, sum = 0, dot = 0;
#pragma unroll
      for (int i = 1; i < Shape::kSlices; ++i) largest = fmaxf(largest, all[i].top);
#pragma unroll
      for (int i = 0; i < Shape::kSlices; ++i) {
        const float factor = exp2_fast(all[i].top - largest);
        sum = fmaf(all[i].mass, factor, sum);
        dot = fmaf(all[i].dot, factor, dot);
      }
      const float inverse = inverse_of(sum);
      weight[half] = exp2_fast(top[half] - largest) * inverse;
      delta[half] = dot * inverse;
    }
  }

  // dC += W^T g for channels 16 warp .. + 15.
  __device__ void add(float (&dc)[kDim / 8][4], int warp) const {
#pragma unroll 1
    for (int rows = 0; rows < Shape::kTile; rows += 16) {
      Split a[4];
      load_split_channels<Shape::kTile, kDim>(a, weights, 16 * warp, rows);
      add_split_rows<Shape::kTile, kDim>(dc, a, g, rows);
    }
  }
};

// Rows of g, 32 channels from `channel` on, times the weight that their part of the output has:
// rows `first` + lane / 4 and + 8 of those from row `begin` of the sequence on and before `end`.
__device__ inline void weigh_float_rows(RowFloats<32>& g, const Weight& weight,
                                        const DeviceSequence& sequence, std::int64_t head,
                                        std::int64_t begin, int first, int end, int channel,
                                        int dim) {
  const RowFactor factor = row_factor(weight, sequence, head);
  const int lane = threadIdx.x & 31, own_channel = channel + 8 * (lane & 3);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + (lane >> 2) + 8 * half;
    const float times = row < end ? factor(begin + row) : 1;
#pragma unroll
    for (int i = 0; i < 8; ++i) g[0][half][i] *= times;
  }
  if (weight.channel == 0 || own_channel >= dim) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const float times = channel_factor(weight, head, own_channel + i);
    g[0][0][i] *= times;
    g[0][1][i] *= times;
  }
}

// e becomes W, dW becomes dq, and t grows by the warp's rows.
__device__ inline void finish_float_rows(RowFloats<32>& e, float (&dw)[4][4], float (&t)[8],
                                         const float (&weight)[2], const float (&delta)[2],
                                         float alpha) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& own = e[0][half][i];
      float& x = dw[i / 2][2 * half + i % 2];
      own *= weight[half];
      x = alpha * own * (x - delta[half]);
      t[i] = fmaf(own, delta[half], t[i]);
    }
  }
}

// t of all rows of the block, from lanes and the two groups of rows, in this order.
template <int kDim>
__device__ inline void write_t(float* to, float (&t)[8], float* scratch, int group, int slice,
                               int dim) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
#pragma unroll
    for (int step = 4; step < 32; step *= 2) t[i] += __shfl_xor_sync(0xFFFFFFFFU, t[i], step);
    if (lane < 4) scratch[group * kDim + 32 * slice + 8 * lane + i] = t[i];
  }
  __syncthreads();
  const int channel = static_cast<int>(threadIdx.x);
  if (channel < dim) to[channel] = scratch[channel] + scratch[kDim + channel];
}

// One block per row job and query head.
template <int kDim>
__global__ void __launch_bounds__(2 * kDim, kDim == 128  ? 1
                                            : kDim == 64 ? 3
                                                         : 6)
    float_rows_backward(const __grid_constant__ TiledCall tiled) {
  using Shape = FloatRowsBackwardShape<kDim>;
  LLN_DYNAMIC_SHARED(shared);
  const DeviceCall& call = tiled.call;
  const RowPiece piece = find_rows(call, blockIdx.x);
  if (piece.s < 0) return;
  const int warp = static_cast<int>(threadIdx.x) >> 5, lane = threadIdx.x & 31;
  const int group = warp / Shape::kSlices, slice = warp % Shape::kSlices;
  unsigned char* const g_tile = shared + Shape::kValueBytes;
  unsigned char* const after = g_tile + 2 * Shape::kTileBytes;
  const FloatRowsTile<kDim> own{
      shared,     g_tile, g_tile + Shape::kTileBytes, reinterpret_cast<RowShare*>(after),
      16 * group, slice};
  float* const exponents = reinterpret_cast<float*>(after + Shape::kShareBytes);
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const int own_dim = dim - 32 * slice, own_dim_v = dim_v - 32 * slice;
  const float* const q = piece.rows<float>(call.q) + 32 * slice;
  const float* const g = piece.rows<float>(call.g) + 32 * slice;
  float* const dq = piece.rows<float>(call.dq) + 32 * slice;
  RowFloats<32> e, g_rows;
  const auto load = [&](int first) {
    load_float_rows<32>(e, q, call.q.token, first, piece.count, own_dim);
    load_float_rows<32>(g_rows, g, call.g.token, first, piece.count, own_dim_v);
  };
  load(own.first);
  wait_for_previous();
  let_next_start();
  const float* const c = tiled.state.c_at(piece.s, piece.head_k);
  for (int l = static_cast<int>(threadIdx.x); l < kDim; l += Shape::kThreads) {
    exponents[l] = l < call.channels ? c[l] * kLog2E : -INFINITY;
  }
  fill_split_tile<kDim, Columns::natural>(shared, tiled.state.values_at(piece.s, piece.head_k),
                                          tiled.state.row, dim, dim_v);
  const float alpha = scale_at(call.alpha, piece.s, piece.head);
  float dc[kDim / 8][4] = {};
  float t[8] = {};
  for (int row = own.first; row - own.first < piece.count; row += Shape::kTile) {
    __syncthreads();  // the sums over the tile before are made
    if (call.kind == Kind::lln_diag) {
      weigh_float_rows(g_rows, call.lln_weight, piece.sequence, piece.head, piece.begin, row,
                       piece.count, 32 * slice, dim_v);
    }
    write_split_rows<Shape::kTile, kDim>(own.g, own.first, slice, g_rows);
    own.meet_group();
    float top[2], mass[2], weight[2], delta[2];
    float_weights<32>(e, exponents + 32 * slice, alpha * kLog2E, top, mass);
    float dw[4][4] = {};
    own.multiply(dw);
    own.exchange(e, dw, top, mass, weight, delta);
    finish_float_rows(e, dw, t, weight, delta, alpha);
    store_float_rows<32>(dq, call.dq.token, row, piece.count, own_dim, dw);
    write_split_rows<Shape::kTile, kDim>(own.weights, own.first, slice, e);
    load(row + Shape::kTile);
    __syncthreads();
    own.add(dc, warp);
  }

  const std::int64_t slot = blockIdx.x;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int channel = 16 * warp + (lane >> 2) + 8 * half;
    if (channel >= dim) continue;
    float* const to = tiled.rows.values + (slot * dim + channel) * dim_v;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const int column = 8 * n + 2 * (lane & 3);
      if (column < dim_v) {
        *reinterpret_cast<float2*>(to + column) = {dc[n][2 * half], dc[n][2 * half + 1]};
      }
    }
  }
  write_t<kDim>(tiled.rows.s + slot * dim, t, reinterpret_cast<float*>(own.shares), group, slice,
                dim);
}

}  // namespace lln::cuda
