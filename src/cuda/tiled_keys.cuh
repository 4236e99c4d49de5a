// The pass over keys: for each piece of a sequence and key head the sums that make (c, C). A warp
// owns 16 channels: the keys, transposed on their way from shared memory, become the left operand
// after an exponential in registers, as in flash attention the scores do; v is the right operand.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_call.h"
#include "cuda/tiles.cuh"

namespace lln::cuda {

inline constexpr int kTileTokens = 64;
inline constexpr float kNoExponent = -3.402823466e38F;  // kNoReference of math/state.h
// The reference exponent of a channel follows its maximum only when that has grown by more than
// this: e <= 2^8 loses nothing in f32 sums, and the sums are rescaled once or twice in a piece.
inline constexpr float kSlack = 8;

// Running sums of a warp's 16 channels: lane (g, t) has rows g and g + 8.
template <int kWidth>
struct ChannelSums {
  float m[2] = {kNoExponent, kNoExponent};
  float s[2] = {0, 0};  // of this lane's tokens
  float values[kWidth / 8][4] = {};

  __device__ void raise(const float (&top)[2]) {
    const bool grown = top[0] > m[0] + kSlack || top[1] > m[1] + kSlack;
    if (!__any_sync(0xFFFFFFFFU, grown)) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float next = fmaxf(m[half], top[half]);
      const float factor = exp2_fast(m[half] - next);
      m[half] = next;
      s[half] *= factor;
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n) {
        values[n][2 * half] *= factor;
        values[n][2 * half + 1] *= factor;
      }
    }
  }
};

// The same sums with reference exponent 0, good while exponents are moderate: the masses tell.
// Nothing is compared, and the masses come out of a product with a column of ones.
template <int kWidth>
struct PlainSums {
  float s[4] = {};  // rows g and g + 8 in [0] and [2]
  float values[kWidth / 8][4] = {};

  // Whether no key can have been lost to underflow, and nothing overflowed.
  __device__ bool trusted() const {
    bool good = s[0] >= 0x1p-60F && s[2] >= 0x1p-60F && s[0] <= 0x1p60F && s[2] <= 0x1p60F;
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) good = good && fabsf(values[n][i]) <= 0x1p120F;
    }
    return good;
  }
  // As sums of one lane of each quad.
  __device__ void take(ChannelSums<kWidth>& sums) const {
    const bool one = (threadIdx.x & 3) == 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      sums.m[half] = 0;
      sums.s[half] = one ? s[2 * half] : 0;
    }
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sums.values[n][i] = values[n][i];
    }
  }
};

template <class T, int kDim, int kWidth>
__device__ inline void add_keys(PlainSums<kWidth>& sums, const unsigned char* k_tile,
                                const unsigned char* v_tile, float scale, std::uint64_t valid) {
  constexpr int kSteps = kTileTokens / 16;
  const int t = threadIdx.x & 3, warp = threadIdx.x >> 5;
  const std::uint32_t ones = pack<T>(1, 1);
  std::uint32_t a[kSteps][4];
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    load_channels<kDim>(a[step], k_tile, 16 * warp, step);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 k = unpack<T>(a[step][i]);
      a[step][i] = pack<T>(exp2_fast(k.x * scale), exp2_fast(k.y * scale));
    }
  }
  if (valid != ~std::uint64_t{0}) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 16 * step + 8 * (i >> 1) + 2 * t;
        if (((valid >> token) & 1) == 0) a[step][i] &= 0xFFFF0000U;
        if (((valid >> token) & 2) == 0) a[step][i] &= 0x0000FFFFU;
      }
    }
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    mma<T>(sums.s, a[step][0], a[step][1], a[step][2], a[step][3], ones, ones);
  }
  multiply_tile<T, kSteps, kWidth>(sums.values, a, v_tile);
}

// Adds one tile of 64 tokens; bit j of `valid` says whether token j counts.
template <class T, int kDim, int kWidth>
__device__ inline void add_keys(ChannelSums<kWidth>& sums, const unsigned char* k_tile,
                                const unsigned char* v_tile, float scale, std::uint64_t valid) {
  constexpr int kSteps = kTileTokens / 16;
  const int lane = threadIdx.x & 31, t = lane & 3, warp = threadIdx.x >> 5;
  std::uint32_t a[kSteps][4];
  float x[kSteps][4][2];
  float top[2] = {kNoExponent, kNoExponent};
  const bool all = valid == ~std::uint64_t{0};
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    load_channels<kDim>(a[step], k_tile, 16 * warp, step);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 k = unpack<T>(a[step][i]);
      x[step][i][0] = clamp_keep_nan(k.x * scale);
      x[step][i][1] = clamp_keep_nan(k.y * scale);
    }
  }
  if (!all) {
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int token = 16 * step + 8 * (i >> 1) + 2 * t + e;
          if (((valid >> token) & 1) == 0) x[step][i][e] = -INFINITY;
        }
      }
    }
  }
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) top[i & 1] = fmaxf(top[i & 1], fmaxf(x[step][i][0], x[step][i][1]));
  }
  top[0] = quad_max(top[0]);
  top[1] = quad_max(top[1]);
  sums.raise(top);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float e0 = exp2_fast(x[step][i][0] - sums.m[i & 1]);
      const float e1 = exp2_fast(x[step][i][1] - sums.m[i & 1]);
      sums.s[i & 1] += e0 + e1;
      a[step][i] = pack<T>(e0, e1);
    }
  }
  multiply_tile<T, kSteps, kWidth>(sums.values, a, v_tile);
}

// Bit j: whether key first + j of the sequence counts, for 64 keys before `end`.
__device__ inline std::uint64_t valid_keys(const Sequences& all, const DeviceSequence& sequence,
                                           std::int64_t first, std::int64_t end) {
  if (all.mask == nullptr) {
    std::uint64_t bits = ~std::uint64_t{0};
    if (first + 64 > end) bits = end > first ? bits >> (64 - (end - first)) : 0;
    if (first < sequence.key_first) {
      const std::int64_t before = sequence.key_first - first;
      bits = before < 64 ? bits >> before << before : 0;
    }
    return bits;
  }
  const int lane = threadIdx.x & 31;
  const bool low = first + lane < end && key_valid(all, sequence, first + lane);
  const bool high = first + 32 + lane < end && key_valid(all, sequence, first + 32 + lane);
  const std::uint64_t low_bits = __ballot_sync(0xFFFFFFFFU, low);
  return low_bits | static_cast<std::uint64_t>(__ballot_sync(0xFFFFFFFFU, high)) << 32;
}

// The keys that a block sums, and how they pass through shared memory.
template <class T, int kDim, int kWidth, int kStages>
struct KeyWalk {
  static constexpr int kThreads = 2 * kDim;
  static constexpr int kKeyBytes = kTileTokens * kDim * 2;
  static constexpr int kStage = kKeyBytes + kTileTokens * kWidth * 2;

  const Sequences& sequences;
  const DeviceSequence& sequence;
  unsigned char* shared;
  const T *k, *v;  // of the first key
  std::int64_t k_stride, v_stride;
  std::int64_t begin;  // in the sequence
  int count;
  int dim, dim_v;
  float scale;

  __device__ void start(int tile) const {
    if (tile * kTileTokens < count) {
      unsigned char* const stage = shared + tile % kStages * kStage;
      const int first = tile * kTileTokens;
      if (sequences.mask == nullptr && first + kTileTokens <= count && dim == kDim &&
          dim_v >= kWidth) {
        copy_whole_tile<kTileTokens, kDim, kThreads>(stage, k, k_stride, first);
        copy_whole_tile<kTileTokens, kWidth, kThreads>(stage + kKeyBytes, v, v_stride, first);
      } else {
        const auto valid = [&](int key) {
          return key < count &&
                 (sequences.mask == nullptr || key_valid(sequences, sequence, begin + key));
        };
        copy_tile<kTileTokens, kDim, kThreads>(stage, k, k_stride, first, dim, valid);
        copy_tile<kTileTokens, kWidth, kThreads>(stage + kKeyBytes, v, v_stride, first, dim_v,
                                                 valid);
      }
    }
    copy_commit();
  }

  template <class Sums>
  __device__ void add_all(Sums& sums) const {
    for (int tile = 0; tile < kStages - 1; ++tile) start(tile);
    for (int tile = 0; tile * kTileTokens < count; ++tile) {
      copy_wait<kStages - 2>();
      __syncthreads();
      start(tile + kStages - 1);
      const unsigned char* const stage = shared + tile % kStages * kStage;
      add_keys<T, kDim, kWidth>(
          sums, stage, stage + kKeyBytes, scale,
          valid_keys(sequences, sequence, begin + tile * kTileTokens, begin + count));
    }
  }

  // Not inlined: it is for rare pieces, and its registers would be everybody's.
  __device__ __noinline__ void add_carefully(ChannelSums<kWidth>& sums) const { add_all(sums); }

  __device__ void sum(ChannelSums<kWidth>& sums) const {
    if constexpr (std::is_same_v<T, Bf16>) {
      PlainSums<kWidth> plain;
      add_all(plain);
      if (__syncthreads_and(plain.trusted())) {
        plain.take(sums);
        return;
      }
      const KeyWalk walk = *this;  // a call by reference would keep this one in memory
      ChannelSums<kWidth> careful;
      walk.add_carefully(careful);
      sums = careful;
    } else {
      add_all(sums);
    }
  }
};

// The sums of a block: a state where they are whole, otherwise a piece of one.
template <int kWidth>
__device__ inline void write_key_sums(const TiledCall& tiled, const ChannelSums<kWidth>& sums,
                                      std::int64_t sequence, std::int64_t head, std::int64_t slot,
                                      int first_column, bool whole) {
  const DeviceCall& call = tiled.call;
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3, warp = threadIdx.x >> 5;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float s = quad_sum(sums.s[half]);
    const float inverse = s == 0 ? 0 : 1 / s;
    const int channel = 16 * warp + g + 8 * half;
    if (channel >= call.dim) continue;
    float* values;
    if (whole) {
      values = tiled.state.values_at(sequence, head) + channel * tiled.state.row;
      if (t == 0 && first_column == 0) {
        tiled.state.c_at(sequence, head)[channel] =
            s == 0 ? -INFINITY : (sums.m[half] + log2f(s)) * kLn2;
      }
    } else {
      values = tiled.keys.values + (slot * call.dim + channel) * call.dim_v;
      if (t == 0 && first_column == 0) {
        tiled.keys.m[slot * call.dim + channel] = sums.m[half];
        tiled.keys.s[slot * call.dim + channel] = s;
      }
    }
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
      const int column = first_column + 8 * n + 2 * t;
      if (column < call.dim_v) {
        *reinterpret_cast<float2*>(values + column) = {sums.values[n][2 * half] * inverse,
                                                       sums.values[n][2 * half + 1] * inverse};
      }
    }
  }
}

// One block per key job, key head and kWidth columns of v. whole: a sequence is one piece, whose
// sums are its state.
template <class T, int kDim, int kWidth, int kStages>
__global__ void __launch_bounds__(2 * kDim, kDim == 64    ? 4
                                            : kDim == 128 ? 2
                                                          : 1)
    key_sums(const __grid_constant__ TiledCall tiled, bool whole) {
  LLN_DYNAMIC_SHARED(shared);
  wait_for_previous();
  let_next_start();
  const DeviceCall& call = tiled.call;
  // 32-bit divisions: a grid has fewer blocks.
  const std::uint32_t splits = kDim <= kWidth ? 1 : (static_cast<int>(call.dim_v) - 1) / kWidth + 1;
  const int first_column = static_cast<int>(blockIdx.x % splits) * kWidth;
  const auto heads = static_cast<std::uint32_t>(call.heads_k);
  const std::uint32_t in_order = blockIdx.x / splits;
  const std::int64_t slot = in_order, head = in_order % heads;
  const JobPlace place = find_key_piece(tiled, in_order / heads);
  if (place.s < 0) return;
  const DeviceSequence& seq = place.sequence;
  const std::int64_t piece = call.sequences.k_jobs.piece(seq.key_end - seq.key_first);
  const std::int64_t begin = seq.key_first + place.index * piece;
  const auto rows_of = [&](const Rows& rows) {
    return static_cast<const T*>(rows.data) + seq.batch * rows.batch + head * rows.head +
           (seq.k_begin + begin) * rows.token;
  };
  const KeyWalk<T, kDim, kWidth, kStages> walk{call.sequences,
                                               seq,
                                               shared,
                                               rows_of(call.k),
                                               rows_of(call.v) + first_column,
                                               call.k.token,
                                               call.v.token,
                                               begin,
                                               static_cast<int>(min(piece, seq.key_end - begin)),
                                               static_cast<int>(call.dim),
                                               static_cast<int>(call.dim_v) - first_column,
                                               scale_at(call.beta, place.s, head) * kLog2E};
  ChannelSums<kWidth> sums;
  walk.sum(sums);

  write_key_sums(tiled, sums, place.s, head, slot, first_column, whole);
}

}  // namespace lln::cuda
