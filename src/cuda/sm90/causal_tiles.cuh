// Chunks of a piece in panels of shared memory, and what the causal walks do with them element by
// element: copies, exponentials, states as operands, triangles.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sm90/wgmma.cuh"
#include "cuda/tiled_causal_chunks.cuh"

namespace lln::cuda::sm90 {

inline constexpr int kParts = kChunk / 16;  // of a chunk's rows or keys

// 64 rows and as many keys: 16 of the rows a warp, as left operand of a product over keys.
using PairWords = std::uint32_t[kParts][4];
using PairSums = float[kChunk / 8][4];

template <int kDim>
struct Shape {
  static constexpr int kTeam = 2 * kDim;  // threads: a warpgroup for 64 columns, or channels
  static constexpr int kGroups = kDim / 64;
  static constexpr int kSteps = kDim / 16;
  static constexpr int kTileBytes = kChunk * kDim * 2;
  static constexpr int kStateBytes = kDim * kDim * 2;
  static constexpr int kVectorBytes = kDim * 16;  // Narrow, as long as channels
  static constexpr int kOnesBytes = 256;
};

// The 16-byte pieces of a tile of 64 rows that a thread of a team takes: below each other, 16 rows
// apart. Tiles are copied and changed by the same threads, which need not wait for others then.
template <int kDim>
struct Pieces {
  static constexpr int kCount = kChunk / 16;
  int row, piece;
  std::uint32_t offset;

  __device__ Pieces()
      : row(static_cast<int>(threadIdx.x) % Shape<kDim>::kTeam / (kDim / 8)),
        piece(static_cast<int>(threadIdx.x) % (kDim / 8)),
        offset(panel_offset<kChunk>(row, piece)) {}
  __device__ int row_at(int i) const { return row + 16 * i; }
  __device__ std::uint32_t at(int i) const { return offset + i * 16 * kPanelRow; }
};

// Copies a chunk of a tensor; zeros past `count` rows and `dim` channels.
template <int kDim>
__device__ inline void copy_chunk(unsigned char* tile, const Bf16* rows, std::int64_t stride,
                                  int first, int count, int dim) {
  const Pieces<kDim> own;
  const Bf16* from = rows + (first + own.row) * stride + 8 * own.piece;
  const std::uint32_t to = shared_address(tile);
  const bool whole = first + kChunk <= count && dim == kDim;
#pragma unroll
  for (int i = 0; i < own.kCount; ++i) {
    const bool there = whole || (first + own.row_at(i) < count && 8 * own.piece < dim);
    copy_async(to + own.at(i), there ? from : rows, there);
    from += 16 * stride;
  }
}

// 0 in place of masked keys and their values, which need not be finite, by those who copied them.
template <int kDim>
__device__ inline void clear_masked(unsigned char* k_tile, unsigned char* v_tile,
                                    std::uint64_t valid) {
  const Pieces<kDim> own;
#pragma unroll 1
  for (int i = 0; i < own.kCount; ++i) {
    if (((valid >> own.row_at(i)) & 1) != 0) continue;
    *reinterpret_cast<uint4*>(k_tile + own.at(i)) = {0, 0, 0, 0};
    *reinterpret_cast<uint4*>(v_tile + own.at(i)) = {0, 0, 0, 0};
  }
}

// 2^(scale k) of a tile of keys; zeros for keys that do not count, which are zeros in the tile too.
template <int kDim>
__device__ inline void write_keys(unsigned char* to, const unsigned char* k_tile, float scale,
                                  std::uint64_t valid, Largest& largest) {
  const Pieces<kDim> own;
#pragma unroll
  for (int i = 0; i < own.kCount; ++i) {
    uint4 words = *reinterpret_cast<const uint4*>(k_tile + own.at(i));
    largest.see(words.x);
    largest.see(words.y);
    largest.see(words.z);
    largest.see(words.w);
    words = {exponentials(words.x, scale), exponentials(words.y, scale),
             exponentials(words.z, scale), exponentials(words.w, scale)};
    const std::uint32_t kept = 0U - static_cast<std::uint32_t>((valid >> own.row_at(i)) & 1);
    *reinterpret_cast<uint4*>(to + own.at(i)) = {words.x & kept, words.y & kept, words.z & kept,
                                                 words.w & kept};
  }
}

// 0 in place of exponentials of padding, from channel `channels` on: of a product of Ea and Eu one
// side suffices. By those who wrote them, while no products are under way: a branch in between
// would have the compiler wait for each of them.
template <int kDim>
__device__ inline void clear_padding(unsigned char* tile, int channels) {
  const Pieces<kDim> own;
  const int left = channels - 8 * own.piece;
  if (left >= 8) return;
#pragma unroll 1
  for (int i = 0; i < own.kCount; ++i) {
    uint4& words = *reinterpret_cast<uint4*>(tile + own.at(i));
    words = {words.x & kept_channels(left), words.y & kept_channels(left - 2),
             words.z & kept_channels(left - 4), words.w & kept_channels(left - 6)};
  }
}

// 2^(scale q) of a tile of queries; zeros past dim.
template <int kDim>
__device__ inline void write_queries(unsigned char* to, const unsigned char* q_tile, float scale,
                                     int dim, Largest& largest) {
  const Pieces<kDim> own;
  const std::uint32_t kept = 8 * own.piece < dim ? ~0U : 0U;
#pragma unroll
  for (int i = 0; i < own.kCount; ++i) {
    uint4 words = *reinterpret_cast<const uint4*>(q_tile + own.at(i));
    largest.see(words.x);
    largest.see(words.y);
    largest.see(words.z);
    largest.see(words.w);
    words = {exponentials(words.x, scale), exponentials(words.y, scale),
             exponentials(words.z, scale), exponentials(words.w, scale)};
    *reinterpret_cast<uint4*>(to + own.at(i)) = {words.x & kept, words.y & kept, words.z & kept,
                                                 words.w & kept};
  }
}

// 16 rows of a warp at a panel of channels, in the order in which results of products lie.
template <int kRows>
__device__ inline void load_left(std::uint32_t (&x)[4][4], const unsigned char* tile, int first,
                                 int panel) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    load_matrices(x[step],
                  shared_address(tile) +
                      panel_offset<kRows>(first + (lane & 15), 8 * panel + 2 * step + (lane >> 4)));
  }
}
template <int kRows>
__device__ inline void write_left(unsigned char* tile, const std::uint32_t (&x)[4][4], int first,
                                  int panel) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      *reinterpret_cast<std::uint32_t*>(
          tile + panel_offset<kRows>(first + g + 8 * (i & 1), 8 * panel + 2 * step + (i >> 1)) +
          4 * t) = x[step][i];
    }
  }
}

// K or G as an operand: [channel, column of v].
template <int kDim, bool kGiven = false>
__device__ inline void write_state(unsigned char* tile, const ChannelRows<kDim>& rows,
                                   const GivenRows<kGiven>& given = {}) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const float2 x = given.plus_values(rows.channel(half), n, t,
                                         {rows.values[n][2 * half], rows.values[n][2 * half + 1]});
      *reinterpret_cast<std::uint32_t*>(tile + panel_offset<kDim>(rows.channel(half), n) + 4 * t) =
          pack<Bf16>(x.x, x.y);
    }
  }
}

// s as an operand of eight equal columns (Narrow).
template <int kDim, bool kGiven>
__device__ inline void write_mass(unsigned char* vector, const ChannelRows<kDim>& rows,
                                  const GivenRows<kGiven>& given) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int channel = rows.channel(half);
    const Bf16 s = __float2bfloat16_rn(given.plus_mass(channel, rows.mass[2 * half]));
    Bf16* const to = reinterpret_cast<Bf16*>(vector + channel / 8 * 128 + 32 * t) + channel % 8;
    to[0] = s;
    to[8] = s;
  }
}

// A vector over rows as an operand (Narrow) of two parts in columns 0 and 1
// (ChannelRows::fold_mass); the other columns are zeros from the start.
__device__ inline void write_parts(unsigned char* vector, int row, float x) {
  Bf16* const to = reinterpret_cast<Bf16*>(vector + row / 8 * 128) + row % 8;
  const Bf16 high = __float2bfloat16_rn(x);
  to[0] = high;
  to[8] = __float2bfloat16_rn(x - __bfloat162float(high));
}

__device__ inline void write_ones(unsigned char* ones) {
  if (threadIdx.x < Shape<64>::kOnesBytes / 4) {
    reinterpret_cast<std::uint32_t*>(ones)[threadIdx.x] = pack<Bf16>(1, 1);
  }
}

template <int kThreads>
__device__ inline void write_zeros(unsigned char* to, int bytes) {
  for (int i = static_cast<int>(threadIdx.x); i < bytes / 4; i += kThreads) {
    reinterpret_cast<std::uint32_t*>(to)[i] = 0;
  }
}

// Sums of pairs to words: those of keys up to the row (kRowsAreKeys: of rows from the key on)
// stay, the others become 0. Without branches, which would make the compiler wait for products
// under way.
template <bool kRowsAreKeys>
__device__ inline void pack_triangle(PairWords& words, const PairSums& sums) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, own = warp_index() & 3;
  std::uint32_t diagonal[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = g + 8 * (i & 1), column = 2 * t + 8 * (i >> 1);
    const bool low = kRowsAreKeys ? column >= row : column <= row;
    const bool high = kRowsAreKeys ? column + 1 >= row : column + 1 <= row;
    diagonal[i] = (low ? 0x0000FFFFU : 0U) | (high ? 0xFFFF0000U : 0U);
  }
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    const std::uint32_t all = (kRowsAreKeys ? part > own : part < own) ? ~0U : 0U;
    const std::uint32_t some = part == own ? ~0U : 0U;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const pair = sums[2 * part + (i >> 1)] + 2 * (i & 1);
      words[part][i] = pack<Bf16>(pair[0], pair[1]) & (all | (some & diagonal[i]));
    }
  }
}

}  // namespace lln::cuda::sm90
