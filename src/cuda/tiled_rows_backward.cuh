// The backward pass over rows of LLN: dq, and for each piece of a sequence dC = W^T g and
// t = W^T delta (with W = e w / sum, tiled_weights.cuh, and w put in at the end). A warp takes 16
// rows for W, dW = g C^T and dq, then 16 channels for the sums over the rows of the whole tile,
// which it reads transposed from shared memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_rows.cuh"

namespace lln::cuda {

// Of the part that LLN's rows have in the output: a factor for each row, and one for each channel
// that is folded into matrices.
struct RowFactor {
  const float* at = nullptr;  // of row 0 of the sequence
  std::int64_t stride = 0;
  float constant = 1;
  bool complement = false;

  __device__ float operator()(std::int64_t row) const {
    const float value = at == nullptr ? constant : at[row * stride];
    return complement ? 1 - value : value;
  }
};

// The factor of rows; weights per channel leave 1 here.
__device__ inline RowFactor row_factor(const Weight& weight, const DeviceSequence& seq,
                                       std::int64_t head) {
  if (weight.channel != 0) return {};
  if (weight.data == nullptr) return {nullptr, 0, weight.constant, weight.complement};
  return {weight.data + seq.batch * weight.batch + head * weight.head + seq.q_begin * weight.token,
          weight.token, 0, weight.complement};
}

__device__ inline float channel_factor(const Weight& weight, std::int64_t head, int channel) {
  return weight.channel == 0 ? 1 : weight_at(weight, 0, head, 0, channel);
}

template <int kDim>
struct RowsBackwardShape {
  static constexpr int kThreads = 2 * kDim;
  static constexpr int kTile = kDim;  // rows: 16 a warp
  static constexpr int kTileBytes = kTile * kDim * 2;
  static constexpr int kStages = 2;
  static constexpr int kStageBytes = 2 * kTileBytes;  // q and g
  static constexpr int kShared = kStages * kStageBytes + kTileBytes + kOperandBytes<kDim, kDim> +
                                 sizeof(RowExponents<kDim>) + kTile * 4;
};

// e of 16 rows and dW become dq (in dw) and e over the rows' sums times the rows' factors (in e);
// delta of each row goes to deltas[row]. dW was made of C rounded without w: channels with the same
// values have the same dW, and dq is 0 where it should be.
template <class T, int kDim>
__device__ inline void finish_rows(RowWords<kDim>& e, float (&dw)[kDim / 8][4], float* deltas,
                                   const float* w, float alpha, const float (&inverse)[2],
                                   const float (&factor)[2]) {
  const int lane = threadIdx.x & 31, tq = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float delta = 0;
#pragma unroll
    for (int group = 0; group < kDim / 32; ++group) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 weight = unpack<T>(e[group][half][i]);
        const float2 ws = *reinterpret_cast<const float2*>(w + 32 * group + 8 * tq + 2 * i);
        float* const x = dw[4 * group + i] + 2 * half;
        x[0] *= ws.x;
        x[1] *= ws.y;
        delta = fmaf(weight.x, x[0], fmaf(weight.y, x[1], delta));
      }
    }
    delta = quad_sum(delta) * inverse[half];
    if (tq == 0) deltas[(lane >> 2) + 8 * half] = delta;
    const float weighted = inverse[half] * factor[half];
#pragma unroll
    for (int group = 0; group < kDim / 32; ++group) {
      const float4 low = *reinterpret_cast<const float4*>(w + 32 * group + 8 * tq);
      const float4 high = *reinterpret_cast<const float4*>(w + 32 * group + 8 * tq + 4);
      const float ws[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 weight = unpack<T>(e[group][half][i]);
        const float2 part = {weight.x * weighted, weight.y * weighted};
        float* const x = dw[4 * group + i] + 2 * half;
        x[0] = alpha * part.x * fmaf(-ws[2 * i], delta, x[0]);
        x[1] = alpha * part.y * fmaf(-ws[2 * i + 1], delta, x[1]);
        e[group][half][i] = pack<T>(part.x, part.y);
      }
    }
  }
}

// delta in two 16-bit numbers: f16 holds what is made smaller first.
template <class T>
inline constexpr float kDeltaFactor = std::is_same_v<T, F16> ? 0x1p-8F : 1;

// t grows by e^T delta for 16 rows of the tile: delta is one more pair of columns of g, its upper
// and its lower half as 16-bit numbers, so that nothing of it is lost. In lanes with t = 0, t[0] +
// t[1] belongs to channel g and t[2] + t[3] to g + 8.
template <class T>
__device__ inline void add_t(float (&t)[4], const std::uint32_t (&a)[4], const float* deltas) {
  const int lane = threadIdx.x & 31, g = lane >> 2;
  std::uint32_t b[2] = {0, 0};
  if (g < 2) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float2 delta = *reinterpret_cast<const float2*>(deltas + 2 * (lane & 3) + 8 * i);
      delta.x *= kDeltaFactor<T>;
      delta.y *= kDeltaFactor<T>;
      const std::uint32_t upper = pack<T>(delta.x, delta.y);
      const float2 taken = unpack<T>(upper);
      b[i] = g == 0 ? upper : pack<T>(delta.x - taken.x, delta.y - taken.y);
    }
  }
  mma<T>(t, a[0], a[1], a[2], a[3], b[0], b[1]);
}

// This warp's rows of a tile of q become e. Not inlined: it is for rare rows, and its registers
// would be everybody's.
template <class T, int kDim>
__device__ __noinline__ void careful_rows(unsigned char* tile, const RowExponents<kDim>& exponents,
                                          float scale, float taken_out) {
  const int first = static_cast<int>(threadIdx.x) / 32 * 16;
  RowWords<kDim> e;
  read_rows<kDim>(e, tile, first);
  careful_weights<T, kDim>(e, exponents, scale, taken_out);
  write_rows<kDim>(tile, first, e);
  __syncwarp();
}

// One block per row job and query head.
template <class T, int kDim>
__global__ void __launch_bounds__(RowsBackwardShape<kDim>::kThreads, kDim <= 64 ? 4 : 1)
    rows_backward(const __grid_constant__ TiledCall tiled) {
  using Shape = RowsBackwardShape<kDim>;
  constexpr int kSteps = Shape::kTile / 16;
  LLN_DYNAMIC_SHARED(shared);
  unsigned char* const e_tile = shared + Shape::kStages * Shape::kStageBytes;
  uint4* const operand = reinterpret_cast<uint4*>(e_tile + Shape::kTileBytes);
  auto& exponents = *reinterpret_cast<RowExponents<kDim>*>(e_tile + Shape::kTileBytes +
                                                           kOperandBytes<kDim, kDim>);
  float* const deltas = reinterpret_cast<float*>(&exponents + 1);  // [tile]
  const DeviceCall& call = tiled.call;
  const RowPiece piece = find_rows(call, blockIdx.x);
  if (piece.s < 0) return;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const T* const q = piece.rows<T>(call.q);
  const T* const g = piece.rows<T>(call.g);
  T* const dq = piece.rows<T>(call.dq);
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const int tiles = (piece.count + Shape::kTile - 1) / Shape::kTile;
  const auto start = [&](int tile) {
    if (tile < tiles) {
      unsigned char* const stage = shared + tile % Shape::kStages * Shape::kStageBytes;
      const auto inside = [&](int row) { return row < piece.count; };
      copy_tile<Shape::kTile, kDim, Shape::kThreads>(stage, q, call.q.token, tile * Shape::kTile,
                                                     dim, inside);
      copy_tile<Shape::kTile, kDim, Shape::kThreads>(stage + Shape::kTileBytes, g, call.g.token,
                                                     tile * Shape::kTile, dim_v, inside);
    }
    copy_commit();
  };
  for (int tile = 0; tile < Shape::kStages - 1; ++tile) start(tile);
  wait_for_previous();
  let_next_start();

  const float taken_out = fill_exponents<T, kDim>(
      exponents, tiled.state.c_at(piece.s, piece.head_k), dim, call.channels);
  const Weight& weight = call.lln_weight;
  fill_operand_transposed<T, kDim, kDim, Columns::direct>(
      operand, tiled.state.values_at(piece.s, piece.head_k), tiled.state.row, dim_v, dim,
      [&](int c, int) { return channel_factor(weight, piece.head, c); });
  const RowFactor factor_of = row_factor(weight, piece.sequence, piece.head);
  const float alpha = scale_at(call.alpha, piece.s, piece.head);
  float dc[kDim / 8][4] = {};
  float t[4] = {};
  for (int tile = 0; tile < tiles; ++tile) {
    copy_wait<Shape::kStages - 2>();
    __syncthreads();
    start(tile + Shape::kStages - 1);
    unsigned char* const q_tile = shared + tile % Shape::kStages * Shape::kStageBytes;
    const unsigned char* const g_tile = q_tile + Shape::kTileBytes;
    RowWords<kDim> e;
    float sum[4] = {};
    read_rows<kDim>(e, q_tile, 16 * warp);
    if constexpr (std::is_same_v<T, Bf16>) {
      moderate_weights<T, kDim>(e, alpha * kLog2E);
      multiply_vector<T, kDim>(sum, e, exponents.packed_w);
      if (!trusted(sum, exponents)) {
        careful_rows<T, kDim>(q_tile, exponents, alpha * kLog2E, taken_out);
        read_rows<kDim>(e, q_tile, 16 * warp);
        sum[0] = sum[2] = 0;
        multiply_vector<T, kDim>(sum, e, exponents.packed_w);
      }
    } else {
      careful_weights<T, kDim>(e, exponents, alpha * kLog2E, taken_out);
      multiply_vector<T, kDim>(sum, e, exponents.packed_w);
    }
    multiply_vector<T, kDim>(sum, e, exponents.packed_rest);
    const float inverse[2] = {inverse_of(sum[0]), inverse_of(sum[2])};
    float dw[kDim / 8][4] = {};
    multiply_rows<T, kDim, kDim>(dw, g_tile, 16 * warp, operand);
    const int row = tile * Shape::kTile + 16 * warp, last = piece.count - 1;
    const float factor[2] = {factor_of(piece.begin + min(row + (lane >> 2), last)),
                             factor_of(piece.begin + min(row + (lane >> 2) + 8, last))};
    finish_rows<T, kDim>(e, dw, deltas + 16 * warp, exponents.w, alpha, inverse, factor);
    store_rows<kDim>(dq, call.dq.token, row, piece.count, dim, dw);
    write_rows<kDim>(e_tile, 16 * warp, e);
    __syncthreads();
    std::uint32_t a[kSteps][4];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      load_channels<kDim>(a[step], e_tile, 16 * warp, step);
      add_t<T>(t, a[step], deltas + 16 * step);
    }
    multiply_tile<T, kSteps, kDim>(dc, a, g_tile);
  }

  const std::int64_t slot = blockIdx.x;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int channel = 16 * warp + (lane >> 2) + 8 * half;
    if (channel >= dim) continue;
    const float w = exponents.w[channel];
    if ((lane & 3) == 0)
      tiled.rows.s[slot * dim + channel] = (t[2 * half] + t[2 * half + 1]) / kDeltaFactor<T> * w;
    float* const to = tiled.rows.values + (slot * dim + channel) * dim_v;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const int column = 8 * n + 2 * (lane & 3);
      if (column < dim_v) {
        *reinterpret_cast<float2*>(to + column) = {
            dc[n][2 * half] * w * channel_factor(weight, piece.head, column),
            dc[n][2 * half + 1] * w * channel_factor(weight, piece.head, column + 1)};
      }
    }
  }
}

}  // namespace lln::cuda
