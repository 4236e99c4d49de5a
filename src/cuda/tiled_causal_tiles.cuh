// Fragments in the tensor core's own ("natural") order, for the causal kernels: what a product
// gives lies in a lane as the left operand of the next one does, and elementwise work meets both.
// Rows reach memory as whole 16-byte pieces after an exchange inside quads.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_causal_call.h"
#include "cuda/tiles.cuh"

namespace lln::cuda {

// Exponents |alpha q| and |beta k| in units of log2 up to this, with reference 0, leave products,
// masses and their inverses far from the ends of f32 and bf16.
inline constexpr float kLargestModerate = 48;

// The same for all lanes, which this lets the compiler know.
__device__ inline int warp_index() {
  return __shfl_sync(0xFFFFFFFFU, static_cast<int>(threadIdx.x) >> 5, 0);
}

// v g^T - delta of a key and two rows, the products rounded as the walk over rows had them when it
// made delta: the difference is 0 where a row sees one key.
__device__ inline void take_delta(float& x, float& y, const float2& delta) {
  const float2 products = unpack<Bf16>(pack<Bf16>(x, y));
  x = products.x - delta.x;
  y = products.y - delta.y;
}

// 16 rows as a left operand: [step of 16 channels][row g, row g + 8, the same 8 channels on].
template <int kWidth>
using RowOperand = std::uint32_t[kWidth / 16][4];

// Rows `first` .. + 15 of a tile at channels 16 step .. + 15.
template <int kWidth>
__device__ inline void load_left(std::uint32_t (&x)[4], const unsigned char* tile, int first,
                                 int step) {
  const int lane = threadIdx.x & 31;
  load_matrices(
      x, shared_address(tile) + tile_offset<kWidth>(first + (lane & 15), 2 * step + (lane >> 4)));
}

template <int kWidth>
__device__ inline void load_left(RowOperand<kWidth>& x, const unsigned char* tile, int first) {
#pragma unroll
  for (int step = 0; step < kWidth / 16; ++step) load_left<kWidth>(x[step], tile, first, step);
}

// 64 channels of 16 rows back into a tile.
template <int kWidth>
__device__ inline void write_left(unsigned char* tile, const RowOperand<64>& x, int first,
                                  int channel) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int piece = channel / 8 + 2 * step + (i >> 1);
      *reinterpret_cast<std::uint32_t*>(tile + tile_offset<kWidth>(first + g + 8 * (i & 1), piece) +
                                        4 * t) = x[step][i];
    }
  }
}

__device__ inline void mma(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                           std::uint32_t b1) {
  mma<Bf16>(d, a[0], a[1], a[2], a[3], b0, b1);
}

// acc += x * rows^T, 16 channels of x, for rows `first` .. + 8 kCount - 1 of a tile.
template <int kWidth, int kCount>
__device__ inline void multiply_by_tile_rows(float (&acc)[kCount][4], const std::uint32_t (&x)[4],
                                             const unsigned char* tile, int first, int step) {
  const int lane = threadIdx.x & 31;
  const int row = first + (lane & 7) + (lane >> 4) * 8, piece = 2 * step + ((lane >> 3) & 1);
#pragma unroll
  for (int n = 0; n < kCount; n += 2) {
    std::uint32_t b[4];
    load_matrices(b, shared_address(tile) + tile_offset<kWidth>(row + 8 * n, piece));
    mma(acc[n], x, b[0], b[1]);
    mma(acc[n + 1], x, b[2], b[3]);
  }
}

// acc += y * rows, for rows `first` .. + 15 of a tile and 8 kCount columns from `column` on.
template <int kWidth, int kCount>
__device__ inline void multiply_by_tile(float (&acc)[kCount][4], const std::uint32_t (&y)[4],
                                        const unsigned char* tile, int first, int column) {
  const int lane = threadIdx.x & 31;
  const int row = first + (lane & 15), piece = column / 8 + (lane >> 4);
#pragma unroll
  for (int n = 0; n < kCount; n += 2) {
    std::uint32_t b[4];
    load_transposed(b, shared_address(tile) + tile_offset<kWidth>(row, piece + n));
    mma(acc[n], y, b[0], b[1]);
    mma(acc[n + 1], y, b[2], b[3]);
  }
}

// 16 x 16 results as a left operand.
__device__ inline void pack_left(std::uint32_t (&y)[4], const float (&x)[2][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    y[i] = pack<Bf16>(x[i >> 1][2 * (i & 1)], x[i >> 1][2 * (i & 1) + 1]);
  }
}

template <int kCount>
__device__ inline void clear(float (&acc)[kCount][4]) {
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[n][i] = 0;
  }
}

// Lower triangle of ones, 16 x 16; all ones where not `diagonal`.
__device__ inline void ones_up_to_row(std::uint32_t (&y)[4], bool diagonal) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = g + 8 * (i & 1), key = 2 * t + 8 * (i >> 1);
    const bool low = !diagonal || key <= row, high = !diagonal || key + 1 <= row;
    y[i] = pack<Bf16>(low ? 1 : 0, high ? 1 : 0);
  }
}

// 2^(scale x) of a word.
__device__ inline std::uint32_t exponentials(std::uint32_t word, float scale) {
  const float2 x = unpack<Bf16>(word);
  return pack<Bf16>(exp2_fast(x.x * scale), exp2_fast(x.y * scale));
}

// The bits that stay of a word of two channels, where `left` channels are left from its first on.
__device__ inline std::uint32_t kept_channels(int left) {
  return left > 1 ? ~0U : left > 0 ? 0x0000FFFFU : 0U;
}

// The largest |x| of the numbers shown to it; NaN where one of them is.
class Largest {
 public:
  __device__ void see(std::uint32_t word) { top_ = larger_magnitudes(top_, word); }
  __device__ bool at_most(float limit) const {
    const float2 top = unpack<Bf16>(top_);
    return top.x <= limit && top.y <= limit;
  }

 private:
  std::uint32_t top_ = 0;
};
inline constexpr float kLargestBf16 = 3.3895314e38F;

// Rows first + g and + 8 of results at channels `column` .. + 8 kCount - 1, as whole pieces.
template <int kCount>
__device__ inline void store_natural(Bf16* rows, std::int64_t stride, int first, int end,
                                     int column, int dim, const float (&acc)[kCount][4],
                                     Largest& largest) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + g + 8 * half;
    Bf16* const to = rows + row * stride + column + 8 * t;
#pragma unroll
    for (int group = 0; group < kCount / 4; ++group) {
      uint4 words;
      const auto word = [&](int n) {
        return pack<Bf16>(acc[4 * group + n][2 * half], acc[4 * group + n][2 * half + 1]);
      };
      words = {word(0), word(1), word(2), word(3)};
      transpose_quad(words.x, words.y, words.z, words.w);
      if (row < end && column + 32 * group + 8 * t < dim) {
        largest.see(words.x);
        largest.see(words.y);
        largest.see(words.z);
        largest.see(words.w);
        __stcs(reinterpret_cast<uint4*>(to + 32 * group), words);
      }
    }
  }
}

// CausalCall::given of a piece's head. It is added where rows read a state and not to the sums of
// the walk: these would lose what is small beside it, in every call again.
template <bool kGiven>
struct GivenRows {
  const float* s = nullptr;  // null: there are no keys
  const float* values = nullptr;
  int dim = 0, dim_v = 0;

  GivenRows() = default;
  __device__ GivenRows(const CausalCall& causal, const CausalPiece& piece)
      : dim(static_cast<int>(causal.call.dim)), dim_v(static_cast<int>(causal.call.dim_v)) {
    if constexpr (kGiven) {
      const std::int64_t slot = piece.s * causal.call.heads_k + piece.head_k;
      if (causal.given.s[slot * dim] == 0) return;  // a key has a mass in every channel
      s = causal.given.s + slot * dim;
      values = causal.given.values + slot * dim * dim_v;
    }
  }

  __device__ float plus_mass(int channel, float x) const {
    return kGiven && s != nullptr && channel < dim ? x + s[channel] : x;
  }
  // Columns 8 n + 2 t and the next.
  __device__ float2 plus_values(int channel, int n, int t, float2 x) const {
    if (!kGiven || s == nullptr || channel >= dim || 8 * n >= dim_v) return x;
    const float2 y =
        *reinterpret_cast<const float2*>(values + std::int64_t{channel} * dim_v + 8 * n + 2 * t);
    return {x.x + y.x, x.y + y.y};
  }
};

// A warp's 16 channels of a state: K and s, or G and T; lane (g, t) has channels g and g + 8.
template <int kDim>
struct ChannelRows {
  float mass[4] = {};  // of channels g and g + 8 in [0] and [2]
  float values[kDim / 8][4] = {};

  __device__ static int channel(int half) {
    const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
    return 16 * warp + (lane >> 2) + 8 * half;
  }

  // From a slot of partial sums.
  __device__ void read(const Partials& from, std::int64_t slot, int dim, int dim_v) {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (channel(half) >= dim) continue;
      mass[2 * half] = mass[2 * half + 1] = from.s[slot * dim + channel(half)];
      const float* const row = from.values + (slot * dim + channel(half)) * dim_v;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        if (8 * n >= dim_v) continue;
        const float2 pair = *reinterpret_cast<const float2*>(row + 8 * n + 2 * t);
        values[n][2 * half] = pair.x;
        values[n][2 * half + 1] = pair.y;
      }
    }
  }

  __device__ void write(const Partials& to, std::int64_t slot, int dim, int dim_v) const {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (channel(half) >= dim) continue;
      if (t == 0) to.s[slot * dim + channel(half)] = mass[2 * half];
      float* const row = to.values + (slot * dim + channel(half)) * dim_v;
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        if (8 * n >= dim_v) continue;
        *reinterpret_cast<float2*>(row + 8 * n + 2 * t) = {values[n][2 * half],
                                                           values[n][2 * half + 1]};
      }
    }
  }

  // Where columns 0 and 1 hold two parts of a sum: it becomes column 0.
  __device__ void fold_mass() {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mass[2 * half] += mass[2 * half + 1];
      mass[2 * half + 1] = 0;
    }
  }

  // As a right operand: [channel, column of v].
  template <bool kGiven = false>
  __device__ void write_tile(unsigned char* tile, const GivenRows<kGiven>& given = {}) const {
    const int t = threadIdx.x & 3;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int n = 0; n < kDim / 8; ++n) {
        const float2 x =
            given.plus_values(channel(half), n, t, {values[n][2 * half], values[n][2 * half + 1]});
        *reinterpret_cast<std::uint32_t*>(tile + tile_offset<kDim>(channel(half), n) + 4 * t) =
            pack<Bf16>(x.x, x.y);
      }
    }
  }
};

// (c, C) after the last token. False where it is out of reach.
template <int kDim>
__device__ inline bool save_state(const StateView& saved, const CausalPiece& piece,
                                  const ChannelRows<kDim>& rows, int dim, int dim_v) {
  const int t = threadIdx.x & 3;
  bool good = true;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int channel = rows.channel(half);
    if (channel >= dim) continue;
    const float s = rows.mass[2 * half], inverse = s == 0 ? 0 : 1 / s;
    good = good && s <= kLargestBf16;
    if (t == 0) saved.c_at(piece.s, piece.head_k)[channel] = s == 0 ? -INFINITY : logf(s);
    float* const to = saved.values_at(piece.s, piece.head_k) + channel * saved.row;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      if (8 * n >= dim_v) continue;
      const float2 pair = {rows.values[n][2 * half] * inverse,
                           rows.values[n][2 * half + 1] * inverse};
      good = good && fabsf(pair.x) <= kLargestBf16 && fabsf(pair.y) <= kLargestBf16;
      *reinterpret_cast<float2*>(to + 8 * n + 2 * t) = pair;
    }
  }
  return good;
}

// What a call asks for of the state after the last token, which the first query head of a group
// writes. False where it is out of reach.
template <int kDim>
__device__ inline bool write_after(const CausalCall& causal, const CausalPiece& piece,
                                   const ChannelRows<kDim>& rows) {
  const DeviceCall& call = causal.call;
  const auto dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  if (!piece.last || piece.head % (call.heads / call.heads_k) != 0) return true;
  bool good = causal.saved.c == nullptr || save_state(causal.saved, piece, rows, dim, dim_v);
  if (causal.own.s == nullptr) return good;
  rows.write(causal.own, piece.s * call.heads_k + piece.head_k, dim, dim_v);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    good = good && rows.mass[2 * half] <= kLargestBf16;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      good = good && fabsf(rows.values[n][2 * half]) <= kLargestBf16 &&
             fabsf(rows.values[n][2 * half + 1]) <= kLargestBf16;
    }
  }
  return good;
}

// Says that a head is out of reach, where a thread of the block finds it not good.
__device__ inline void report_reach(const CausalCall& causal, const CausalPiece& piece, bool good) {
  if (good) return;
  raise_flag(causal.flags[0]);
  raise_flag(causal.flags[1 + piece.s * causal.call.heads_k + piece.head_k]);
}

// Rows before the first valid key, which the first piece's block writes.
template <class T>
__device__ inline void zero_rows_before(T* first_row, std::int64_t stride, std::int64_t rows,
                                        int dim) {
  constexpr int kEach = 16 / sizeof(T);
  for (std::int64_t row = 1 + threadIdx.x / 16; row <= rows; row += blockDim.x / 16) {
    for (int i = threadIdx.x % 16; i < dim / kEach; i += 16) {
      *reinterpret_cast<uint4*>(first_row - row * stride + kEach * i) = {0, 0, 0, 0};
    }
  }
}

}  // namespace lln::cuda
