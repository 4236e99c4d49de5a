// How warps share a tile of 64 rows or keys in the backward passes of Diag: four groups of 16 rows.
// Where results of 16 rows do not fit into the registers of a warp, two warps work on a group, or
// four: each computes the scores of its part of the other tile, and holds its part of the columns
// of the results.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tile_parts.cuh"
#include "cuda/tiled_diag_walk.cuh"

namespace lln::cuda {

template <int kDim>
struct DiagSplit {
  static constexpr int kWarps = kDim <= 64 ? 1 : kDim / 64;  // of a group of 16 rows
  // Of tiles in shared memory. Where there is room for one only, nothing is under way during
  // products.
  static constexpr int kStages = kDim <= 128 ? 2 : 1;
  static constexpr int kThreads = kDiagThreads * kWarps;
  static constexpr int kHeld = kDim / kWarps;         // columns of results a warp
  static constexpr int kScored = kDiagTile / kWarps;  // of the other tile a warp
  static constexpr int kTileBytes = kDiagTile * kDim * 2;
  static constexpr int kWordBytes = kWarps == 1 ? 0 : kDiagTile * kDiagTile * 2;  // WarpWords

  int group, part;

  __device__ DiagSplit()
      : group(static_cast<int>(threadIdx.x >> 5) % 4),
        part(static_cast<int>(threadIdx.x >> 5) / 4) {}

  __device__ int first_row() const { return 16 * group; }
  __device__ int first_column() const { return part * kHeld; }
  // Where the rows begin that this warp takes of the other tile.
  __device__ int scored() const { return part * kScored; }
  // Waits for the other warps of the group.
  __device__ void join() const {
    if constexpr (kWarps > 1) meet(group + 1, 32 * kWarps);
  }
};

// What the warps of a group tell each other of a row.
struct SharedRow {
  float top, mass, dot;
};

// Left operands of 16 x 64 that the warps of a group made parts of, in shared memory.
template <class Split>
struct WarpWords {
  uint4* words;  // [group, step, lane]

  __device__ void put(const Split& split, int step, const std::uint32_t (&a)[4]) const {
    words[(split.group * 4 + step) * 32 + (threadIdx.x & 31)] = {a[0], a[1], a[2], a[3]};
  }
  __device__ void get(const Split& split, int step, std::uint32_t (&a)[4]) const {
    const uint4 word = words[(split.group * 4 + step) * 32 + (threadIdx.x & 31)];
    a[0] = word.x;
    a[1] = word.y;
    a[2] = word.z;
    a[3] = word.w;
  }
};

// A tile times a factor for each column.
template <class T, int kWidth, int kThreads>
__device__ inline void scale_columns(unsigned char* tile, const float* factors) {
  for (int i = static_cast<int>(threadIdx.x); i < kDiagTile * kWidth / 8; i += kThreads) {
    const int piece = i % (kWidth / 8);
    auto& at = *reinterpret_cast<uint4*>(tile + tile_offset<kWidth>(i / (kWidth / 8), piece));
    std::uint32_t words[4] = {at.x, at.y, at.z, at.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float2 pair = unpack<T>(words[j]);
      const float* const factor = factors + 8 * piece + 2 * j;
      words[j] = pack<T>(pair.x * factor[0], pair.y * factor[1]);
    }
    at = {words[0], words[1], words[2], words[3]};
  }
}

// Scores become -inf and their gradients 0 where bit j of `seen` (rows lane / 4 and + 8) says that
// a row does not see column j.
template <int kCount>
__device__ inline void mask_pairs(float (&scores)[kCount][4], float (&gradients)[kCount][4],
                                  const std::uint64_t (&seen)[2]) {
  const bool all = seen[0] == ~std::uint64_t{0} && seen[1] == ~std::uint64_t{0};
  if (__all_sync(0xFFFFFFFFU, all)) return;
  const int t = threadIdx.x & 3;
  const std::uint64_t own[2] = {seen[0] >> (2 * t), seen[1] >> (2 * t)};
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (((own[i >> 1] >> (8 * n + (i & 1))) & 1) == 0) {
        scores[n][i] = -INFINITY;
        gradients[n][i] = 0;
      }
    }
  }
}

}  // namespace lln::cuda
