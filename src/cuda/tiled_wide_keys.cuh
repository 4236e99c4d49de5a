// The backward pass over keys of LLN for 129 to 256 channels (tiled_keys_backward.cuh): Kn takes
// the place of k in its tile, then half of the warps have dv = Kn dC and half
// dk = beta Kn (v dC^T - t), each 32 columns of all rows of the tile. One matrix in shared memory
// serves both products.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_keys_backward.cuh"
#include "cuda/tiled_wide.cuh"

namespace lln::cuda {

struct alignas(1024) WideKeysShared {
  unsigned char stages[kWideStages][2][kWideTileBytes];  // k, which becomes Kn, and v
  unsigned char matrix[kWideMatrixBytes];                // dC with factors
  float added[kWideDim], factors[kWideDim], t_sums[kWideDim];
};

// What the keys of a block are multiplied with.
struct WideKeys {
  static constexpr int kBands = kWideTile / 16;

  const WideKeysShared& shared;
  float beta, shift, unfactor;
  int dim, dim_v;

  // 16 rows and 32 channels of k become Kn.
  template <class T>
  __device__ void weigh(unsigned char* k_tile, int first, int channel, bool folded) const {
    RowWords<32> kn;
    read_columns<kWideDim, 32>(kn, k_tile, first, channel);
    key_weights<T, 32>(kn, shared.added + channel, beta * kLog2E, folded);
    write_columns<kWideDim, 32>(k_tile, first, channel, kn);
  }

  // 32 columns of dv.
  template <class T>
  __device__ void of_values(float (&acc)[kBands][4][4], const unsigned char* kn_tile,
                            int column) const {
    multiply_wide<T, kBands>(acc, kn_tile, 0, shared.matrix, column, wide_groups(dim));
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
      if constexpr (kWeightShift<T> != 0) {
#pragma unroll
        for (int i = 0; i < 16; ++i) acc[band][i / 4][i % 4] *= shift * unfactor;
      }
      to_direct<32>(acc[band]);
    }
  }

  // 32 channels of dk.
  template <class T>
  __device__ void of_keys(float (&acc)[kBands][4][4], const unsigned char* kn_tile,
                          const unsigned char* v_tile, int channel) const {
    multiply_wide_transposed<T, kBands>(acc, v_tile, 0, shared.matrix, channel, wide_groups(dim_v));
    const float* const sums = shared.t_sums + channel + 8 * (threadIdx.x & 3);
    const float times = beta * shift;
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
      RowWords<32> kn;
      read_columns<kWideDim, 32>(kn, kn_tile, 16 * band, channel);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float2 sum = *reinterpret_cast<const float2*>(sums + 2 * n);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float2 weight = unpack<T>(kn[0][half][n]);
          float* const x = acc[band][n] + 2 * half;
          x[0] = times * weight.x * (x[0] * unfactor - sum.x);
          x[1] = times * weight.y * (x[1] * unfactor - sum.y);
        }
      }
    }
  }
};

// One block per job and key head.
template <class T>
__global__ void __launch_bounds__(kWideThreads, 1)
    wide_keys_backward(const __grid_constant__ TiledCall tiled) {
  LLN_DYNAMIC_SHARED(bytes);
  auto& shared = *reinterpret_cast<WideKeysShared*>(bytes);
  const DeviceCall& call = tiled.call;
  const KeyRows rows = key_rows(tiled);
  if (rows.s < 0) return;
  const DeviceSequence& seq = rows.sequence;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const T* const k = rows.rows<T>(call.k);
  const T* const v = rows.rows<T>(call.v);
  const int tiles = (rows.count + kWideTile - 1) / kWideTile;
  const auto start = [&](int tile) {
    if (tile < tiles) {
      copy_wide_tiles(shared.stages[tile % kWideStages], k, call.k.token, dim, v, call.v.token,
                      dim_v, tile * kWideTile, rows.count, true);
    }
    copy_commit();
  };
  for (int tile = 0; tile < kWideStages - 1; ++tile) start(tile);
  wait_for_previous();
  let_next_start();

  const float* const sums = tiled.grads.values_at(rows.s, rows.head);
  float factor = 1;
  if constexpr (std::is_same_v<T, F16>) {
    factor = matrix_factor(sums, tiled.grads.row, dim, dim_v, shared.added);
    __syncthreads();
  }
  const float beta = scale_at(call.beta, rows.s, rows.head);
  const bool folded = fill_key_channels<T, kWideDim, kWideThreads>(
      shared.added, shared.factors, shared.t_sums, tiled.state.c_at(rows.s, rows.head),
      tiled.grads.c_at(rows.s, rows.head), 1, dim);
  __syncthreads();
  fill_direct_tile<T, kWideDim, kWideThreads>(
      shared.matrix, sums, tiled.grads.row, dim, dim_v,
      [&](int l, int) { return shared.factors[l] * factor; });
  const WideKeys keys{shared,     beta, kWeightShift<T> == 0 ? 1 : exp2f(-kWeightShift<T>),
                      1 / factor, dim,  dim_v};
  const int warp = static_cast<int>(threadIdx.x) >> 5, column = warp % kWideGroups * 32;
  const int first = warp / kWideGroups * 16;  // of the rows whose Kn this warp makes
  const bool of_values = warp < kWideGroups;
  T* const out = rows.rows<T>(of_values ? call.dv : call.dk) + column;
  const std::int64_t stride = of_values ? call.dv.token : call.dk.token;
  const int width = (of_values ? dim_v : dim) - column;
  for (int tile = 0; tile < tiles; ++tile) {
    copy_wait<kWideStages - 2>();
    __syncthreads();
    start(tile + kWideStages - 1);
    unsigned char* const k_tile = shared.stages[tile % kWideStages][0];
    const unsigned char* const v_tile = shared.stages[tile % kWideStages][1];
    keys.weigh<T>(k_tile, first, column, folded);
    __syncthreads();
    if (width <= 0) continue;
    float acc[WideKeys::kBands][4][4] = {};
    if (of_values) {
      keys.of_values<T>(acc, k_tile, column);
    } else {
      keys.of_keys<T>(acc, k_tile, v_tile, column);
    }
#pragma unroll
    for (int band = 0; band < WideKeys::kBands; ++band) {
      const int row = tile * kWideTile + 16 * band;
      zero_invalid(acc[band], call.sequences, seq, rows.begin + row);
      store_rows<32>(out, stride, row, rows.count, width, acc[band]);
    }
  }
}

}  // namespace lln::cuda
