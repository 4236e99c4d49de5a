// The LLN part of LLN+Diag in the backward passes, for warps that share tiles as Diag does: dq and
// what rows add to dC and t, then dk and dv.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_diag_split.cuh"
#include "cuda/tiled_keys_backward.cuh"
#include "cuda/tiled_rows_backward.cuh"

namespace lln::cuda {

// delta is one more column of g for the sums over rows.
template <class T>
__device__ inline void put_delta(std::uint16_t* deltas, int row, float delta) {
  const float x = delta * kDeltaFactor<T>;
  const std::uint32_t high = pack<T>(x, 0);
  const std::uint32_t low = pack<T>(x - unpack<T>(high).x, 0);
  deltas[row] = static_cast<std::uint16_t>(high);
  deltas[kDiagTile + row] = static_cast<std::uint16_t>(low);
}

// e of 16 rows of a tile where moderate_weights() does not do, and its sums. Not inlined: it is for
// rare rows, and its registers would be everybody's.
template <class T, int kDim>
__device__ __noinline__ void careful_from_tile(RowWords<kDim>& e, float (&sum)[4],
                                               const unsigned char* tile, int first,
                                               const RowExponents<kDim>& exponents, float scale,
                                               float taken_out) {
  read_rows<kDim>(e, tile, first);
  careful_weights<T, kDim>(e, exponents, scale, taken_out);
  sum[0] = sum[1] = sum[2] = sum[3] = 0;
  multiply_vector<T, kDim>(sum, e, exponents.packed_w);
  multiply_vector<T, kDim>(sum, e, exponents.packed_rest);
}

// The LLN part of a tile of rows.
template <class T, int kDim>
struct LlnRowGradients {
  using Split = DiagSplit<kDim>;
  static constexpr int kHeld = Split::kHeld;

  // C with the part's weights for channels, in direct order, and without w: channels with the same
  // values have the same dW, and dq is 0 where it should be.
  const unsigned char* state;
  const RowExponents<kDim>& exponents;
  SharedRow* shares;
  std::uint16_t* deltas;
  float alpha, taken_out;

  // Adds what the two warps of a group found for rows g and g + 8.
  __device__ void join(const Split& split, float& low, float& high) const {
    if constexpr (Split::kWarps > 1) {
      const int lane = threadIdx.x & 31, row = split.first_row() + (lane >> 2);
      split.join();  // what was there has been read
      if ((lane & 3) == 0) {
        shares[split.part * kDiagTile + row].dot = low;
        shares[split.part * kDiagTile + row + 8].dot = high;
      }
      split.join();
      low = shares[row].dot + shares[kDiagTile + row].dot;
      high = shares[row + 8].dot + shares[kDiagTile + row + 8].dot;
    }
  }

  // e of this warp's channels, and the sums of rows g and g + 8 in [0] and [2].
  __device__ void weights(const Split& split, const unsigned char* q_tile, RowWords<kHeld>& e,
                          float (&sum)[4]) const {
    const auto take_half = [&](const RowWords<kDim>& all) {
#pragma unroll
      for (int group = 0; group < kHeld / 32; ++group) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          const std::uint32_t high = all[kDim / 32 - kHeld / 32 + group][i / 4][i % 4];
          e[group][i / 4][i % 4] = split.part == 0 ? all[group][i / 4][i % 4] : high;
        }
      }
    };
    if constexpr (std::is_same_v<T, Bf16>) {
      read_columns<kDim, kHeld>(e, q_tile, split.first_row(), split.first_column());
      moderate_weights<T, kHeld>(e, alpha * kLog2E);
      multiply_vector<T, kHeld>(sum, e, exponents.packed_w + split.first_column() / 8);
      multiply_vector<T, kHeld>(sum, e, exponents.packed_rest + split.first_column() / 8);
      join(split, sum[0], sum[2]);
      if (trusted(sum, exponents)) return;
      RowWords<kDim> again;  // in memory, unlike e
      float again_sum[4];
      careful_from_tile<T, kDim>(again, again_sum, q_tile, split.first_row(), exponents,
                                 alpha * kLog2E, taken_out);
      take_half(again);
      sum[0] = again_sum[0];
      sum[2] = again_sum[2];
    } else {
      RowWords<kDim> all;
      read_rows<kDim>(all, q_tile, split.first_row());
      careful_weights<T, kDim>(all, exponents, alpha * kLog2E, taken_out);
      multiply_vector<T, kDim>(sum, all, exponents.packed_w);  // w is 1 or 0 in f16
      take_half(all);
    }
  }

  // dq of LLN in direct order; e over the sums of rows times `factor` takes the place of q.
  __device__ void add(const Split& split, unsigned char* rows, const float (&factor)[2],
                      float (&dw)[kHeld / 8][4]) const {
    const int lane = threadIdx.x & 31, tq = lane & 3;
    RowWords<kHeld> e;
    float sum[4] = {};
    weights(split, rows, e, sum);
    multiply_tiles<T, kDim, kHeld / 8>(dw, rows + Split::kTileBytes, split.first_row(),
                                       state + split.first_column() * kDim * 2);
    const auto w_of = [&](int n) {
      return *reinterpret_cast<const float2*>(exponents.w + split.first_column() + 32 * (n / 4) +
                                              8 * tq + 2 * (n % 4));
    };
    float delta[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float dot = 0;
#pragma unroll
      for (int n = 0; n < kHeld / 8; ++n) {
        const float2 w = w_of(n);
        const float2 weight = unpack<T>(e[n / 4][half][n % 4]);
        float* const x = dw[n] + 2 * half;
        x[0] *= w.x;
        x[1] *= w.y;
        dot = fmaf(weight.x, x[0], fmaf(weight.y, x[1], dot));
      }
      delta[half] = quad_sum(dot);
    }
    join(split, delta[0], delta[1]);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = inverse_of(sum[2 * half]), part = inverse * factor[half];
      delta[half] *= inverse;
#pragma unroll
      for (int n = 0; n < kHeld / 8; ++n) {
        const float2 w = w_of(n);
        const float2 weight = unpack<T>(e[n / 4][half][n % 4]);
        const float2 parts = {weight.x * part, weight.y * part};
        float* const x = dw[n] + 2 * half;
        x[0] = alpha * parts.x * fmaf(-w.x, delta[half], x[0]);
        x[1] = alpha * parts.y * fmaf(-w.y, delta[half], x[1]);
        e[n / 4][half][n % 4] = pack<T>(parts.x, parts.y);
      }
      if (split.part == 0 && tq == 0) {
        put_delta<T>(deltas, split.first_row() + (lane >> 2) + 8 * half, delta[half]);
      }
    }
    write_columns<kDim, kHeld>(rows, split.first_row(), split.first_column(), e);
  }
};

// Sums over the rows of a tile for 16 channels a warp: dC, and t in column 0 and 1 of another
// product.
template <class T, int kDim>
__device__ inline void add_row_sums(float (&dc)[kDim / 8][4], float (&t)[4],
                                    const unsigned char* e_tile, const unsigned char* g_tile,
                                    const std::uint16_t* deltas) {
  const int lane = threadIdx.x & 31, g = lane >> 2, tq = lane & 3;
  const int channel = 16 * (static_cast<int>(threadIdx.x) >> 5);
  if (channel >= kDim) return;
#pragma unroll
  for (int step = 0; step < kDiagTile / 16; ++step) {
    std::uint32_t a[4], b[2] = {0, 0};
    load_channels<kDim>(a, e_tile, channel, step);
    if (g < 2) {
      const std::uint16_t* const from = deltas + g * kDiagTile + 16 * step + 2 * tq;
      b[0] = *reinterpret_cast<const std::uint32_t*>(from);
      b[1] = *reinterpret_cast<const std::uint32_t*>(from + 8);
    }
    mma<T>(t, a[0], a[1], a[2], a[3], b[0], b[1]);
    multiply_step<T, kDim, kDim>(dc, a, g_tile, step, 0);
  }
}

// What a piece adds to dC and t of its key head.
template <class T, int kDim>
__device__ inline void write_row_sums(const TiledCall& tiled, std::int64_t head, const float* w,
                                      const float (&dc)[kDim / 8][4], const float (&t)[4]) {
  const DeviceCall& call = tiled.call;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const int lane = threadIdx.x & 31;
  const std::int64_t slot = backwards();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int channel = 16 * (static_cast<int>(threadIdx.x) >> 5) + (lane >> 2) + 8 * half;
    if (channel >= dim) continue;
    if ((lane & 3) == 0) {
      tiled.rows.s[slot * dim + channel] =
          (t[2 * half] + t[2 * half + 1]) * (w[channel] / kDeltaFactor<T>);
    }
    float* const to = tiled.rows.values + (slot * dim + channel) * dim_v;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const int column = 8 * n + 2 * (lane & 3);
      if (column < dim_v) {
        const Weight& weight = call.lln_weight;
        *reinterpret_cast<float2*>(to + column) = {
            dc[n][2 * half] * w[channel] * channel_factor(weight, head, column),
            dc[n][2 * half + 1] * w[channel] * channel_factor(weight, head, column + 1)};
      }
    }
  }
}

// The LLN part of keys, as in keys_backward.
template <class T, int kDim>
struct LlnKeyGradients {
  using Split = DiagSplit<kDim>;
  static constexpr int kHeld = Split::kHeld;

  const unsigned char* sums;  // dC with `factors` and `factor`
  const float *added, *t_sums;
  float beta, factor;
  bool folded;

  // Fills the shared memory; all threads of the block take part, and must meet before it is read.
  __device__ LlnKeyGradients(const TiledCall& tiled, const RowPiece& keys, unsigned char* tile,
                             float* vectors) {
    const DeviceCall& call = tiled.call;
    const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
    float* const factors = vectors + kDim;
    float* const to_added = vectors;
    float* const to_sums = vectors + 2 * kDim;
    sums = tile;
    added = to_added;
    t_sums = to_sums;
    const float* const values = tiled.grads.values_at(keys.s, keys.head);
    factor = 1;
    if constexpr (std::is_same_v<T, F16>) {
      // No larger: Diag's part is multiplied with it too.
      factor = fminf(matrix_factor(values, tiled.grads.row, dim, dim_v, vectors), 0x1p40F);
      __syncthreads();
    }
    const float* const c = tiled.state.c_at(keys.s, keys.head);
    const float* const t = tiled.grads.c_at(keys.s, keys.head);
    beta = scale_at(call.beta, keys.s, keys.head);
    folded = fill_key_channels<T, kDim, Split::kThreads>(to_added, factors, to_sums, c, t, 1, dim);
    __syncthreads();
    fill_direct_tile<T, kDim, Split::kThreads>(tile, values, tiled.grads.row, dim, dim_v,
                                               [&](int l, int) { return factors[l] * factor; });
  }

  // Adds Kn dC to dv.
  __device__ void add_values(const Split& split, const RowWords<kDim>& kn,
                             float (&dv)[kHeld / 8][4]) const {
    const float times = exp2f(kWeightShift<T>) * factor, back = 1 / times;
    if constexpr (std::is_same_v<T, F16>) {
#pragma unroll
      for (int n = 0; n < kHeld / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) dv[n][i] *= times;
      }
    }
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      const auto& words = kn[step / 2];
      const int pair = step % 2 * 2;
      const std::uint32_t a[4] = {words[0][pair], words[1][pair], words[0][pair + 1],
                                  words[1][pair + 1]};
      multiply_step<T, kDim, kHeld>(dv, a, sums, step, split.first_column());
    }
    if constexpr (std::is_same_v<T, F16>) {
#pragma unroll
      for (int n = 0; n < kHeld / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) dv[n][i] *= back;
      }
    }
  }

  // Adds beta Kn (v dC^T - t) to dk, which is in direct order: 32 channels from `first` on.
  __device__ void add_keys(const Split& split, const std::uint32_t (&kn)[2][4],
                           const unsigned char* v_tile, int first, float (&dk)[4][4]) const {
    const int tq = threadIdx.x & 3;
    const float unfactor = 1 / factor, shift = beta * exp2f(-kWeightShift<T>);
    float acc[4][4] = {};
    multiply_tiles<T, kDim, 4>(acc, v_tile, split.first_row(), sums + first * kDim * 2);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      const float2 sum = *reinterpret_cast<const float2*>(t_sums + first + 8 * tq + 2 * n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float2 weight = unpack<T>(kn[half][n]);
        const float* const x = acc[n] + 2 * half;
        float* const to = dk[n] + 2 * half;
        to[0] = fmaf(shift * weight.x, x[0] * unfactor - sum.x, to[0]);
        to[1] = fmaf(shift * weight.y, x[1] * unfactor - sum.y, to[1]);
      }
    }
  }
};

}  // namespace lln::cuda
