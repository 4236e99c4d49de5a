// Causal LLN of heads with 129 to 256 channels: what its kernels over rows and over keys share. A
// state of 256 x 256 does not stay on a multiprocessor, so that sequences are cut into short pieces
// whose states lie in device memory, and a block has 64 rows, or keys, of a piece: its results are
//   x M,  or x M^T,  +  masked(x y^T) z
// where x are its own tokens, M the sums over all tokens of other pieces, and y and z what the
// tokens of its own piece have, 64 at a time.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_causal_tiles.cuh"
#include "cuda/tiled_keys.cuh"

namespace lln::cuda {

// Shorter pieces have more states to write and read, longer ones more pairs of tokens.
inline constexpr int kWideCausalPieceLog2 = 8;
inline constexpr Jobs kWideCausalJobs{kWideCausalPieceLog2, kWideCausalPieceLog2,
                                      kWideCausalPieceLog2};
inline constexpr int kWideCausalTiles = (1 << kWideCausalPieceLog2) / kChunk;  // of a piece

struct WideCausalCall {
  // `before` has sums of pieces: s and K of the keys of the piece before, or, in the last part of
  // the backward pass, T and G of the rows of this one, of all heads of a group.
  CausalCall causal;
  // The sums of these: over all pieces before, or over this one and all behind it.
  // [slot * heads_k][dim], and [slot * heads_k][dim, dim_v].
  float* masses = nullptr;
  Bf16* matrices = nullptr;
  float* last_masses = nullptr;  // s of the last piece of every sequence, where the state is saved
};

struct WideCausalShape {
  static constexpr int kDim = 256;
  static constexpr int kThreads = 256;
  static constexpr int kBands = 2;                      // of 16 rows, a warp
  static constexpr int kColumns = 64;                   // of results, a warp
  static constexpr int kGroups = kDim / kColumns;       // of columns
  static constexpr int kTileBytes = kChunk * kDim * 2;  // also a quarter of a matrix
  static constexpr int kPairBytes = kChunk * kChunk * 2;
  static constexpr int kPairs = kChunk / kGroups;  // partners of a warp's tokens
};

// A warp's 32 rows and 64 columns of results, in natural order.
using WideCausalSums = float[WideCausalShape::kBands][WideCausalShape::kColumns / 8][4];

struct alignas(1024) WideCausalShared {
  unsigned char own[WideCausalShape::kTileBytes];
  unsigned char stages[2][WideCausalShape::kTileBytes];
  unsigned char pairs[WideCausalShape::kPairBytes];
  float channels[WideCausalShape::kDim];
  float rows[2][WideCausalShape::kGroups][kChunk];
  CausalPiece piece;  // here it takes no registers
};

// The block's piece, where there is one with such a tile.
__device__ inline bool share_piece(WideCausalShared& shared, const CausalPiece& piece, int tile) {
  if (piece.s < 0 || tile * kChunk >= piece.count) return false;
  if (threadIdx.x == 0) shared.piece = piece;
  __syncthreads();
  return true;
}

// Which rows and columns of the results are a warp's.
struct WideCausalWarp {
  int first, group;
  __device__ WideCausalWarp()
      : first(16 * WideCausalShape::kBands * (warp_index() / WideCausalShape::kGroups)),
        group(warp_index() % WideCausalShape::kGroups) {}
  __device__ int column() const { return group * WideCausalShape::kColumns; }
};

// acc += x y for 32 rows x from row `first` on, and columns from `column` on: sums over `steps`
// steps of 16, from `x_step` on in x.
template <int kXWidth, int kCount>
__device__ inline void multiply_wide_tiles(float (&acc)[2][kCount][4], const unsigned char* x,
                                           int first, int x_step, const unsigned char* y,
                                           int column, int steps) {
  constexpr int kWidth = WideCausalShape::kDim;
#pragma unroll 1
  for (int step = 0; step < steps; ++step) {
    std::uint32_t a[2][4];
    load_left<kXWidth>(a[0], x, first, x_step + step);
    load_left<kXWidth>(a[1], x, first + 16, x_step + step);
    multiply_by_tile<kWidth>(acc[0], a[0], y, 16 * step, column);
    multiply_by_tile<kWidth>(acc[1], a[1], y, 16 * step, column);
  }
}

// acc += x y^T for the same and rows of y from `row` on, which is kYWidth wide.
template <int kYWidth, int kCount>
__device__ inline void multiply_wide_rows(float (&acc)[2][kCount][4], const unsigned char* x,
                                          int first, int x_step, const unsigned char* y, int row,
                                          int steps) {
#pragma unroll(kCount > 2 ? 1 : 2)
  for (int step = 0; step < steps; ++step) {
    std::uint32_t a[2][4];
    load_left<WideCausalShape::kDim>(a[0], x, first, x_step + step);
    load_left<WideCausalShape::kDim>(a[1], x, first + 16, x_step + step);
    const int lane = threadIdx.x & 31;
    const int from = row + (lane & 7) + (lane >> 4) * 8, piece = 2 * step + ((lane >> 3) & 1);
#pragma unroll
    for (int n = 0; n < kCount; n += 2) {
      std::uint32_t b[4];
      load_matrices(b, shared_address(y) + tile_offset<kYWidth>(from + 8 * n, piece));
#pragma unroll
      for (int band = 0; band < 2; ++band) {
        mma(acc[band][n], a[band], b[0], b[1]);
        mma(acc[band][n + 1], a[band], b[2], b[3]);
      }
    }
  }
}

// The 16-byte pieces of a tile that this thread has copied: f(row, words), channels from
// wide_channel() on.
__device__ inline int wide_channel() { return 8 * static_cast<int>(threadIdx.x & 31); }
template <class F>
__device__ inline void each_own_piece(unsigned char* tile, F&& f) {
  constexpr int kStep = WideCausalShape::kThreads / 32;
#pragma unroll 2
  for (int i = 0; i < kChunk / kStep; ++i) {
    const int row = static_cast<int>(threadIdx.x) / 32 + i * kStep;
    auto* const at =
        reinterpret_cast<uint4*>(tile + tile_offset<WideCausalShape::kDim>(row, threadIdx.x & 31));
    uint4 words = *at;
    f(row, words);
    *at = words;
  }
}

template <class Valid>
__device__ inline void copy_wide_tokens(unsigned char* tile, const Bf16* rows, std::int64_t stride,
                                        int first, int dim, Valid&& valid) {
  copy_tile<kChunk, WideCausalShape::kDim, WideCausalShape::kThreads>(tile, rows, stride, first,
                                                                      dim, valid);
}

// Exponentials of 8 channels, rounded.
__device__ inline uint4 exponentials(const uint4& x, float scale) {
  return {exponentials(x.x, scale), exponentials(x.y, scale), exponentials(x.z, scale),
          exponentials(x.w, scale)};
}
// Of q: zeros where there are no channels, of which `left` are left from its first on.
__device__ inline uint4 row_exponentials(const uint4& x, float scale, int left) {
  const uint4 e = exponentials(x, scale);
  return {e.x & kept_channels(left), e.y & kept_channels(left - 2), e.z & kept_channels(left - 4),
          e.w & kept_channels(left - 6)};
}
__device__ inline void see(Largest& largest, const uint4& x) {
  largest.see(x.x);
  largest.see(x.y);
  largest.see(x.z);
  largest.see(x.w);
}

// Keys of a piece. Those that do not count are never read, and lie in tiles as zeros.
struct WideCausalKeys {
  const DeviceCall& call;
  const CausalPiece& piece;
  const Bf16 *k, *v;
  float scale;
  int count;  // before the last valid one's end
  bool inside;

  __device__ WideCausalKeys(const DeviceCall& of, const CausalPiece& at)
      : call(of),
        piece(at),
        k(at.keys<const Bf16>(of.k)),
        v(at.keys<const Bf16>(of.v)),
        scale(scale_at(of.beta, at.s, at.head_k) * kLog2E),
        count(static_cast<int>(
            max(std::int64_t{0}, min(std::int64_t{at.count}, at.sequence.key_end - at.begin)))),
        inside(wide_channel() < of.dim) {}

  __device__ std::uint64_t valid(int tile) const {
    return valid_keys(call.sequences, piece.sequence, piece.begin + tile * kChunk,
                      piece.begin + count);
  }
  __device__ void copy_k(unsigned char* to, int tile) const {
    copy(to, k, call.k.token, tile, static_cast<int>(call.dim));
  }
  __device__ void copy_v(unsigned char* to, int tile) const {
    copy(to, v, call.v.token, tile, static_cast<int>(call.dim_v));
  }
  // k becomes Eu; zeros where nothing counts. f(words) sees every piece.
  template <class F>
  __device__ void raise(unsigned char* k_tile, int tile, Largest& largest, F&& f) const {
    const std::uint64_t bits = valid(tile);
    each_own_piece(k_tile, [&](int row, uint4& words) {
      see(largest, words);
      const bool counts = inside && ((bits >> row) & 1) != 0;
      words = counts ? exponentials(words, scale) : uint4{0, 0, 0, 0};
      f(words);
    });
  }

 private:
  __device__ void copy(unsigned char* to, const Bf16* rows, std::int64_t stride, int tile,
                       int dim) const {
    const std::uint64_t bits = valid(tile);
    const int first = tile * kChunk;
    copy_wide_tokens(to, rows, stride, first, dim,
                     [=](int row) { return ((bits >> (row - first)) & 1) != 0; });
  }
};

// Rows of a query head in the backward pass of keys.
struct WideCausalRows {
  const WideCausalCall& wide;
  const CausalPiece& piece;

  // Tokens of a tile of any tensor.
  __device__ void copy(unsigned char* to, const Rows& tensor, std::int64_t head, int tile,
                       std::int64_t dim) const {
    CausalPiece at = piece;
    at.head = head;
    const int count = piece.count;
    copy_wide_tokens(to, at.rows<const Bf16>(tensor), tensor.token, tile * kChunk,
                     static_cast<int>(dim), [=](int row) { return row < count; });
  }
  // q becomes Y: Ea rounded as the walk over rows has it, over the mass.
  __device__ void weigh(unsigned char* q_tile, std::int64_t head, int tile) const {
    const float scale = scale_at(wide.causal.call.alpha, piece.s, head) * kLog2E;
    const int left = wide.causal.call.channels - wide_channel();
    const float* const inverse = wide.causal.inverse + statistics_at(wide.causal, piece, head);
    each_own_piece(q_tile, [&](int row, uint4& words) {
      const int token = tile * kChunk + row;
      const float factor = token < piece.count ? inverse[token] : 0;
      const auto weight = [&](std::uint32_t word) {
        const float2 e = unpack<Bf16>(word);
        return pack<Bf16>(e.x * factor, e.y * factor);
      };
      words = row_exponentials(words, scale, left);
      words = {weight(words.x), weight(words.y), weight(words.z), weight(words.w)};
    });
  }
};

// A word of a tile where results of natural order lie: row g + 8 half of 16 rows from `first` on,
// columns 8 n + 2 t and the next.
__device__ inline float2 natural_pair(const unsigned char* tile, int first, int half, int column) {
  const int lane = threadIdx.x & 31;
  const int row = first + (lane >> 2) + 8 * half;
  return unpack<Bf16>(*reinterpret_cast<const std::uint32_t*>(
      tile + tile_offset<WideCausalShape::kDim>(row, column / 8) + 4 * (lane & 3)));
}

}  // namespace lln::cuda
