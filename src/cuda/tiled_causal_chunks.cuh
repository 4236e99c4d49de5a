// Chunks of a piece on their way to shared memory, and what the walks do with the keys of a chunk:
// exponentials, and their sums into the state.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_causal_tiles.cuh"
#include "cuda/tiled_keys.cuh"

namespace lln::cuda {

static_assert(kChunk == kTileTokens);

template <int kDim>
struct CausalShape {
  static constexpr int kThreads = 2 * kDim;     // a warp for 16 channels
  static constexpr int kHalves = kDim / 64;     // of the columns; a warp has 16 rows of one of them
  static constexpr int kPart = kDim / kHalves;  // columns of a warp
  static constexpr int kTileBytes = kChunk * kDim * 2;
  static constexpr int kStateBytes = kDim * kDim * 2;
};

// Copies chunks of 64 rows of a tensor; zeros past `count` rows and `dim` channels.
template <int kDim>
__device__ inline void copy_chunk(unsigned char* tile, const Bf16* rows, std::int64_t stride,
                                  int first, int count, int dim) {
  constexpr int kThreads = CausalShape<kDim>::kThreads;
  if (first + kChunk <= count && dim == kDim) {
    copy_whole_tile<kChunk, kDim, kThreads>(tile, rows, stride, first);
  } else {
    copy_tile<kChunk, kDim, kThreads>(tile, rows, stride, first, dim,
                                      [count](int row) { return row < count; });
  }
}

// Keys and values of a piece.
template <int kDim>
struct KeyChunks {
  const Sequences& sequences;
  const CausalPiece& piece;
  const Bf16 *k, *v;
  std::int64_t k_stride, v_stride;
  int count;  // keys before the last valid one's end
  int dim, dim_v;

  __device__ KeyChunks(const DeviceCall& call, const CausalPiece& at)
      : sequences(call.sequences),
        piece(at),
        k(at.keys<const Bf16>(call.k)),
        v(at.keys<const Bf16>(call.v)),
        k_stride(call.k.token),
        v_stride(call.v.token),
        count(static_cast<int>(
            max(std::int64_t{0}, min(std::int64_t{at.count}, at.sequence.key_end - at.begin)))),
        dim(static_cast<int>(call.dim)),
        dim_v(static_cast<int>(call.dim_v)) {}

  // Masked keys come along; clear_masked() is for them.
  __device__ void copy(unsigned char* k_tile, unsigned char* v_tile, int first) const {
    copy_chunk<kDim>(k_tile, k, k_stride, first, count, dim);
    copy_chunk<kDim>(v_tile, v, v_stride, first, count, dim_v);
  }

  // Whether there are such keys in a chunk.
  __device__ bool masked(std::uint64_t valid_bits) const {
    return sequences.mask != nullptr && valid_bits != ~std::uint64_t{0};
  }

  // Bit j: whether key first + j counts.
  __device__ std::uint64_t valid(int first) const {
    return valid_keys(sequences, piece.sequence, piece.begin + first, piece.begin + count);
  }
};

// 0 in place of masked keys and their values, which need not be finite. All threads of the block
// take part, after the copies have arrived for all.
template <int kDim>
__device__ inline void clear_masked(unsigned char* k_tile, unsigned char* v_tile,
                                    std::uint64_t valid) {
  constexpr int kPieces = kDim / 8, kStep = CausalShape<kDim>::kThreads / kPieces;
  const int piece = static_cast<int>(threadIdx.x) % kPieces;
#pragma unroll 1
  for (int row = static_cast<int>(threadIdx.x) / kPieces; row < kChunk; row += kStep) {
    if (((valid >> row) & 1) != 0) continue;
    const std::uint32_t at = tile_offset<kDim>(row, piece);
    *reinterpret_cast<uint4*>(k_tile + at) = {0, 0, 0, 0};
    *reinterpret_cast<uint4*>(v_tile + at) = {0, 0, 0, 0};
  }
  __syncthreads();
}

// 2^(scale k) of a tile of keys; zeros for keys that do not count.
template <int kDim>
__device__ inline void write_exponentials(unsigned char* to, const unsigned char* k_tile,
                                          float scale, std::uint64_t valid, Largest& largest) {
  constexpr int kPieces = kDim / 8, kStep = CausalShape<kDim>::kThreads / kPieces;
  const int first = static_cast<int>(threadIdx.x) / kPieces;
  const int piece = static_cast<int>(threadIdx.x) % kPieces;
#pragma unroll
  for (int i = 0; i < kChunk / kStep; ++i) {
    const int row = first + i * kStep;
    const std::uint32_t at = tile_offset<kDim>(row, piece);
    uint4 words = {0, 0, 0, 0};
    if (valid == ~std::uint64_t{0} || ((valid >> row) & 1) != 0) {
      words = *reinterpret_cast<const uint4*>(k_tile + at);
      largest.see(words.x);
      largest.see(words.y);
      largest.see(words.z);
      largest.see(words.w);
      words = {exponentials(words.x, scale), exponentials(words.y, scale),
               exponentials(words.z, scale), exponentials(words.w, scale)};
    }
    *reinterpret_cast<uint4*>(to + at) = words;
  }
}

// 0 in place of exponentials of padding, from channel `channels` on: of a product of Ea and Eu one
// side suffices. Apart from the exponentials, so that calls without padding do nothing for it.
template <int kDim>
__device__ inline void clear_row_padding(RowOperand<kDim>& x, int channels) {
  const int left = channels - 2 * (static_cast<int>(threadIdx.x) & 3);
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[step][i] &= kept_channels(left - (16 * step + 8 * (i >> 1)));
  }
}

// 16 rows of q become Ea; nothing past dim.
template <int kDim>
__device__ inline void row_exponentials(RowOperand<kDim>& x, float scale, int dim) {
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[step][i] = 16 * step + 8 * (i >> 1) < dim ? exponentials(x[step][i], scale) : 0;
    }
  }
}

// The masked 16 x 16 part of a product of rows and keys on the diagonal of a chunk.
__device__ inline void mask_diagonal(float (&x)[2][4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (8 * n + 2 * t + (i & 1) > g + 8 * (i >> 1)) x[n][i] = 0;
    }
  }
}

// rows += x^T y of a chunk, and their masses: x^T 1.
template <int kDim>
__device__ inline void add_chunk(ChannelRows<kDim>& rows, const unsigned char* x_tile,
                                 const unsigned char* y_tile) {
  const int warp = threadIdx.x >> 5;
  const std::uint32_t ones = pack<Bf16>(1, 1);
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) {
    std::uint32_t a[4];
    load_channels<kDim>(a, x_tile, 16 * warp, step);
    mma(rows.mass, a, ones, ones);
    multiply_by_tile<kDim>(rows.values, a, y_tile, 16 * step, 0);
  }
}

// The same with masses x^T y for a vector of f32, in two parts (ChannelRows::fold_mass).
template <int kDim>
__device__ inline void add_chunk(ChannelRows<kDim>& rows, const unsigned char* x_tile,
                                 const unsigned char* y_tile, const float* vector) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int step = 0; step < kChunk / 16; ++step) {
    std::uint32_t a[4], b[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 x = *reinterpret_cast<const float2*>(vector + 16 * step + 8 * i + 2 * t);
      b[i] = pack<Bf16>(x.x, x.y);
      if (g == 1) {
        const float2 high = unpack<Bf16>(b[i]);
        b[i] = pack<Bf16>(x.x - high.x, x.y - high.y);
      }
      if (g > 1) b[i] = 0;
    }
    load_channels<kDim>(a, x_tile, 16 * warp, step);
    mma(rows.mass, a, b[0], b[1]);
    multiply_by_tile<kDim>(rows.values, a, y_tile, 16 * step, 0);
  }
}

// s as a right operand for left ones in natural order.
template <int kDim, bool kGiven>
__device__ inline void write_mass(Bf16* vector, const ChannelRows<kDim>& rows,
                                  const GivenRows<kGiven>& given) {
  if ((threadIdx.x & 3) != 0) return;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int channel = rows.channel(half);
    vector[channel] = __float2bfloat16_rn(given.plus_mass(channel, rows.mass[2 * half]));
  }
}

}  // namespace lln::cuda
