// The backward pass over rows of LLN for 129 to 256 channels (tiled_rows_backward.cuh): dq, and for
// each piece of a sequence dC = W^T g and t = W^T delta. Eight warps share 16 rows and exchange
// what they find of mass and delta. dC has as many numbers as a multiprocessor has registers: its
// columns are two blocks', of which one also makes dW, dq and t. g has the weight of the LLN part
// beside Diag: that of a row is a factor of W, those of channels are factors of columns of C and
// dC.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_rows_backward.cuh"
#include "cuda/tiled_wide.cuh"

namespace lln::cuda {

inline constexpr int kWideColumns = 128;  // of dC, a block

// Blocks of a row job and query head.
__host__ __device__ inline std::uint32_t wide_splits(std::int64_t dim_v) {
  return dim_v > kWideColumns ? 2 : 1;
}

struct alignas(1024) WideRowsShared {
  unsigned char stages[kWideStages][2][kWideTileBytes];  // q, which becomes W / w, and g
  unsigned char matrix[kWideMatrixBytes];                // C
  RowExponents<kWideDim> exponents;
  // What the warps of a row tell each other.
  float tops[kWideGroups][kWideTile], masses[kWideGroups][kWideTile], dots[kWideGroups][kWideTile];
  float deltas[kWideTile];
};

// A warp's 16 rows and 32 channels of a tile.
template <class T>
struct WideRows {
  WideRowsShared& shared;
  float alpha, taken_out;
  int dim, dim_v;
  bool lead;         // dW, dq and t are this block's
  int first, group;  // row and group of channels

  __device__ int row(int half) const {
    return first + static_cast<int>(threadIdx.x & 31) / 4 + 8 * half;
  }
  __device__ void meet_others() const { meet(1 + first / 16, 32 * kWideGroups); }
  __device__ void leave(float (&parts)[kWideGroups][kWideTile], int half, float x) const {
    if ((threadIdx.x & 3) == 0) parts[group][row(half)] = x;
  }
  // In an order that is the same in all warps.
  __device__ float total(const float (&parts)[kWideGroups][kWideTile], int half) const {
    float sum = parts[0][row(half)];
#pragma unroll
    for (int i = 1; i < kWideGroups; ++i) sum += parts[i][row(half)];
    return sum;
  }

  // q becomes e with the reference that fits each row.
  __device__ void careful(RowWords<32>& q) const {
    const float scale = alpha * kLog2E;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      leave(shared.tops, half,
            largest_exponent<T, 32>(q, half, shared.exponents.c + 32 * group, scale));
    }
    meet_others();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float top = shared.tops[0][row(half)];
#pragma unroll
      for (int i = 1; i < kWideGroups; ++i) top = fmaxf(top, shared.tops[i][row(half)]);
      weights_below<T, 32>(q, half, shared.exponents.added + 32 * group, scale, top - taken_out);
    }
  }

  // Sums over all channels of e w and, with dW in `dw` times w, of e w dW.
  __device__ void exchange(const RowWords<32>& e, const float (&dw)[4][4], float (&mass)[2],
                           float (&dot)[2]) const {
    float sum[4] = {};
    multiply_vector<T, 32>(sum, e, shared.exponents.packed_w + 4 * group);
    multiply_vector<T, 32>(sum, e, shared.exponents.packed_rest + 4 * group);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      leave(shared.masses, half, sum[2 * half]);
      if (!lead) continue;
      float part = 0;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float2 weight = unpack<T>(e[0][half][n]);
        part = fmaf(weight.x, dw[n][2 * half], fmaf(weight.y, dw[n][2 * half + 1], part));
      }
      leave(shared.dots, half, quad_sum(part));
    }
    meet_others();
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mass[half] = total(shared.masses, half);
      dot[half] = lead ? total(shared.dots, half) : 0;
    }
  }

  // The rows' part of a tile: q becomes e over the sum of its row in place, times factor(row), `dw`
  // dq, and delta goes to shared memory. C was rounded without w, as in finish_rows().
  template <class Factor>
  __device__ void run(unsigned char* q_tile, const unsigned char* g_tile, float (&dw)[4][4],
                      Factor&& factor) const {
    const float* const w = shared.exponents.w + 32 * group + 8 * (threadIdx.x & 3);
    if (lead && 32 * group < dim) {
      multiply_wide_transposed<T, 1>(reinterpret_cast<float(&)[1][4][4]>(dw), g_tile, first,
                                     shared.matrix, 32 * group, wide_groups(dim_v));
#pragma unroll
      for (int i = 0; i < 16; ++i) dw[i / 4][i % 4] *= w[2 * (i / 4) + i % 2];
    }
    RowWords<32> e;
    float mass[2], dot[2];
    read_columns<kWideDim, 32>(e, q_tile, first, 32 * group);
    if constexpr (std::is_same_v<T, Bf16>) {
      moderate_weights<T, 32>(e, alpha * kLog2E);
      exchange(e, dw, mass, dot);
      // All warps of these rows decide the same.
      if (!trusted({mass[0], 0, mass[1], 0}, shared.exponents)) {
        read_columns<kWideDim, 32>(e, q_tile, first, 32 * group);
        careful(e);
        exchange(e, dw, mass, dot);
      }
    } else {
      careful(e);
      exchange(e, dw, mass, dot);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = inverse_of(mass[half]), delta = dot[half] * inverse;
      const float times = inverse * factor(row(half));
      if (lead && group == 0 && (threadIdx.x & 3) == 0) shared.deltas[row(half)] = delta;
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float2 weight = unpack<T>(e[0][half][n]);
        const float2 part = {weight.x * times, weight.y * times};
        float* const x = dw[n] + 2 * half;
        x[0] = alpha * part.x * fmaf(-w[2 * n], delta, x[0]);
        x[1] = alpha * part.y * fmaf(-w[2 * n + 1], delta, x[1]);
        e[0][half][n] = pack<T>(part.x, part.y);
      }
    }
    write_columns<kWideDim, 32>(q_tile, first, 32 * group, e);
  }
};

// What a warp has of dC, 16 channels and kWideColumns columns, and of t.
template <class T>
__device__ inline void write_wide_sums(const TiledCall& tiled, std::int64_t slot, int first_column,
                                       std::int64_t head, const float* w,
                                       const float (&dc)[kWideColumns / 8][4],
                                       const float (&t)[4]) {
  const Weight& weight = tiled.call.lln_weight;
  const int dim = static_cast<int>(tiled.call.dim), dim_v = static_cast<int>(tiled.call.dim_v);
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int channel = 16 * (static_cast<int>(threadIdx.x) >> 5) + (lane >> 2) + 8 * half;
    if (channel >= dim) continue;
    if ((lane & 3) == 0 && first_column == 0) {
      tiled.rows.s[slot * dim + channel] =
          (t[2 * half] + t[2 * half + 1]) / kDeltaFactor<T> * w[channel];
    }
    float* const to = tiled.rows.values + (slot * dim + channel) * dim_v;
#pragma unroll
    for (int n = 0; n < kWideColumns / 8; ++n) {
      const int column = first_column + 8 * n + 2 * (lane & 3);
      if (column < dim_v) {
        *reinterpret_cast<float2*>(to + column) = {
            dc[n][2 * half] * w[channel] * channel_factor(weight, head, column),
            dc[n][2 * half + 1] * w[channel] * channel_factor(weight, head, column + 1)};
      }
    }
  }
}

// One block per row job, query head and kWideColumns columns of v.
template <class T>
__global__ void __launch_bounds__(kWideThreads, 1)
    wide_rows_backward(const __grid_constant__ TiledCall tiled) {
  LLN_DYNAMIC_SHARED(bytes);
  auto& shared = *reinterpret_cast<WideRowsShared*>(bytes);
  const DeviceCall& call = tiled.call;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const std::uint32_t splits = wide_splits(dim_v), slot = blockIdx.x / splits;
  const int first_column = static_cast<int>(blockIdx.x % splits) * kWideColumns;
  const RowPiece piece = find_rows(call, slot);
  if (piece.s < 0) return;
  const bool lead = first_column == 0;
  const T* const q = piece.rows<T>(call.q);
  const T* const g = piece.rows<T>(call.g);
  T* const dq = piece.rows<T>(call.dq);
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  const int tiles = (piece.count + kWideTile - 1) / kWideTile;
  // Without dW a block needs its own columns of g alone.
  const bool of_g = static_cast<int>(threadIdx.x) % (kWideDim / 8) >= first_column / 8;
  const auto start = [&](int tile) {
    if (tile < tiles) {
      copy_wide_tiles(shared.stages[tile % kWideStages], q, call.q.token, dim, g, call.g.token,
                      dim_v, tile * kWideTile, piece.count, of_g);
    }
    copy_commit();
  };
  for (int tile = 0; tile < kWideStages - 1; ++tile) start(tile);
  wait_for_previous();
  let_next_start();

  const float taken_out = fill_exponents<T, kWideDim>(
      shared.exponents, tiled.state.c_at(piece.s, piece.head_k), dim, call.channels);
  if (lead) {
    fill_direct_tile<T, kWideDim, kWideThreads>(
        shared.matrix, tiled.state.values_at(piece.s, piece.head_k), tiled.state.row, dim, dim_v,
        [&](int, int c) { return channel_factor(call.lln_weight, piece.head, c); });
  }
  const WideRows<T> rows{shared,
                         scale_at(call.alpha, piece.s, piece.head),
                         taken_out,
                         dim,
                         dim_v,
                         lead,
                         warp / kWideGroups * 16,
                         warp % kWideGroups};
  float dc[kWideColumns / 8][4] = {};
  float t[4] = {};
  for (int tile = 0; tile < tiles; ++tile) {
    copy_wait<kWideStages - 2>();
    __syncthreads();
    start(tile + kWideStages - 1);
    unsigned char* const q_tile = shared.stages[tile % kWideStages][0];
    const unsigned char* const g_tile = shared.stages[tile % kWideStages][1];
    float dw[4][4] = {};
    rows.run(q_tile, g_tile, dw, [&](int row) {
      const std::int64_t own = piece.begin + min(tile * kWideTile + row, piece.count - 1);
      return row_factor(call.lln_weight, piece.sequence, piece.head)(own);
    });
    if (lead) {
      store_rows<32>(dq + 32 * rows.group, call.dq.token, tile * kWideTile + rows.first,
                     piece.count, dim - 32 * rows.group, dw);
    }
    __syncthreads();
    if (16 * warp >= dim) continue;
#pragma unroll
    for (int step = 0; step < kWideTile / 16; ++step) {
      std::uint32_t a[4];
      load_channels<kWideDim>(a, q_tile, 16 * warp, step);
      if (lead) add_t<T>(t, a, shared.deltas + 16 * step);
      multiply_step<T, kWideDim, kWideColumns>(dc, a, g_tile, step, first_column);
    }
  }
  write_wide_sums<T>(tiled, slot, first_column, piece.head, shared.exponents.w, dc, t);
}

}  // namespace lln::cuda
