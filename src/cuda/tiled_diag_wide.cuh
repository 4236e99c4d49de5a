// The forward pass over rows of Diag for 129 to 256 channels. The sums of 16 rows do not fit into
// the registers of a warp: two warps take the same rows, each with half of the columns of v, and
// both find the weights, so that neither waits for the other. q, k and v have a tile of shared
// memory each, and while one block copies another one computes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_diag_rows.cuh"
#include "cuda/tiled_diag_split.cuh"

namespace lln::cuda {

struct WideDiagShape {
  static constexpr int kDim = 256;
  static constexpr int kThreads = 2 * kDiagThreads;
  static constexpr int kHeld = kDim / 2;  // columns of o a warp
  static constexpr int kScored = 32;      // keys whose scores a warp holds at a time
  static constexpr int kTileBytes = kDiagTile * kDim * 2;
  static constexpr int kChannelsAt = 3 * kTileBytes;          // after q, k and v
  static constexpr int kShared = kChannelsAt + 2 * kDim * 4;  // factors of Diag and of LLN
};

// A warp's part of the rows of a block.
template <class T>
struct WideDiagRows {
  using Shape = WideDiagShape;

  int first_row, first_column;
  DiagRows<Shape::kHeld> sums;

  __device__ WideDiagRows()
      : first_row(16 * (static_cast<int>(threadIdx.x >> 5) % 4)),
        first_column(static_cast<int>(threadIdx.x >> 5) / 4 * Shape::kHeld) {}

  // Adds the first `keys` of a tile.
  __device__ void add(const unsigned char* q_tile, const unsigned char* k_tile,
                      const unsigned char* v_tile, float scale, const std::uint64_t (&seen)[2],
                      int keys, bool first) {
    constexpr int kCount = Shape::kScored / 8;
    const std::uint64_t rest = ~low_bits(Shape::kScored);
#pragma unroll 1
    for (int key = 0; key < min(keys, kDiagTile); key += Shape::kScored) {
      float scores[kCount][4] = {};
      multiply_tiles<T, Shape::kDim, kCount>(scores, q_tile, first_row,
                                             k_tile + key * Shape::kDim * 2);
      mask_scores(scores, {seen[0] >> key | rest, seen[1] >> key | rest});
      std::uint32_t p[kCount / 2][4];
      sums.template soften<T>(p, scores, scale, first && key == 0);
#pragma unroll
      for (int step = 0; step < kCount / 2; ++step) {
        multiply_step<T, Shape::kDim, Shape::kHeld>(sums.acc, p[step], v_tile, key / 16 + step,
                                                    first_column);
      }
    }
  }

  // Finished rows: weights `diag` over the mass, and those of an LLN part that `to` holds without
  // its weight, where `adds`. channels[part, column].
  __device__ void write(T* to, std::int64_t stride, int row, int end, int columns,
                        const float (&diag)[2], const float (&lln)[2], const float* lln_channels,
                        bool adds) const {
#pragma unroll
    for (int pass = 0; pass < Shape::kHeld / kPassWidth; ++pass) {
      const int column = pass * kPassWidth;
      float out[4][4] = {};
      if (adds) {
        add_stored_natural<T>(out, to + column, stride, row, end, columns - column);
#pragma unroll
        for (int n = 0; n < 4; ++n) {
          const float2 factor = *reinterpret_cast<const float2*>(lln_channels + column + 8 * n +
                                                                 2 * (threadIdx.x & 3));
#pragma unroll
          for (int i = 0; i < 4; ++i) out[n][i] *= lln[i >> 1] * (i % 2 == 0 ? factor.x : factor.y);
        }
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          out[n][i] = fmaf(sums.acc[4 * pass + n][i], diag[i >> 1], out[n][i]);
        }
      }
      store_natural<T>(to + column, stride, row, end, columns - column, out);
    }
  }
};

template <class T>
__global__ void __launch_bounds__(WideDiagShape::kThreads, 2)
    wide_diag_forward(const __grid_constant__ TiledCall tiled) {
  using Shape = WideDiagShape;
  LLN_DYNAMIC_SHARED(shared);
  unsigned char* const q_tile = shared;
  unsigned char* const k_tile = shared + Shape::kTileBytes;
  unsigned char* const v_tile = shared + 2 * Shape::kTileBytes;
  float* const channels = reinterpret_cast<float*>(shared + Shape::kChannelsAt);
  float* const lln_channels = channels + Shape::kDim;
  const DeviceCall& call = tiled.call;
  const DiagPiece piece = find_diag_rows<false>(tiled);
  if (piece.rows.s < 0) return;
  const std::int64_t head = piece.rows.head;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  for (int c = static_cast<int>(threadIdx.x); c < Shape::kDim; c += Shape::kThreads) {
    channels[c] = c < dim_v ? channel_factor(call.diag_weight, head, c) : 0;
    lln_channels[c] = c < dim_v ? channel_factor(call.lln_weight, head, c) : 0;
  }
  wait_for_previous();
  const RowFactor diag_factor = row_factor(call.diag_weight, piece.rows.sequence, head);
  const RowFactor lln_factor = row_factor(call.lln_weight, piece.rows.sequence, head);
  const float scale = kLog2E * rsqrtf(static_cast<float>(call.channels));
  const T* const q = piece.rows.template rows<T>(call.q);
  const auto keys = keys_of<T, Shape::kDim, Shape::kThreads>(call, piece.rows);
  WideDiagRows<T> rows;
  T* const o = piece.rows.template rows<T>(call.o) + rows.first_column;
  DiagStep<true> step;
  for (step.open(piece); step.tile < piece.tiles; step.next(piece, 1)) {
    const int first = piece.tile_begin(step.tile), end = piece.tile_end(step.tile);
    __syncthreads();  // what was there has been read
    if (step.opens()) {
      copy_tile<kDiagTile, Shape::kDim, Shape::kThreads>(q_tile, q, call.q.token, first, dim,
                                                         [&](int row) { return row < end; });
      rows.sums.reset();
    }
    start_keys(keys, call.sequences, piece, step, k_tile);
    copy_commit();
    copy_wait<0>();
    __syncthreads();
    const int row = first + rows.first_row, lane_row = row + ((threadIdx.x & 31) >> 2);
    const int own[2] = {min(lane_row, end - 1), min(lane_row + 8, end - 1)};
    if (step.has_keys()) {
      const std::uint64_t valid = step_keys(call.sequences, piece, step);
      rows.add(q_tile, k_tile, v_tile, scale,
               {seen_keys(piece, step, own[0], valid), seen_keys(piece, step, own[1], valid)},
               step.key_end - step.key, step.opens());
    }
    if (!step.last_keys()) continue;
    if (call.diag_weight.channel != 0) rows.sums.scale_columns(channels + rows.first_column);
    const float diag[2] = {
        quick_inverse(rows.sums.mass[0]) * diag_factor(piece.rows.begin + own[0]),
        quick_inverse(rows.sums.mass[2]) * diag_factor(piece.rows.begin + own[1])};
    const float lln[2] = {lln_factor(piece.rows.begin + own[0]),
                          lln_factor(piece.rows.begin + own[1])};
    rows.write(o, call.o.token, row, end, dim_v - rows.first_column, diag, lln,
               lln_channels + rows.first_column, tiled.adds);
  }
}

}  // namespace lln::cuda
