// The backward pass of Diag in f32. A block of threads takes a tile of tokens with all query heads
// of a key head, one after the other: everything that their gradients depend on lies in the tile,
// so that dk and dv add up in registers and nothing is saved for rows. Gradients of the LLN part
// have been written before, and these are added to them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "cuda/tiled_f32_diag.cuh"
#include "cuda/tiled_f32_rows_backward.cuh"
#include "cuda/tiled_keys_backward.cuh"

namespace lln::cuda {

template <int kDim>
struct FloatDiagBackwardShape {
  static constexpr int kThreads = 256;
  static constexpr int kHalves = 2;  // warps that share 16 rows or keys: 32 keys, kDim / 2 channels
  static constexpr int kTileBytes = kSplitBytes<kDiagTile, kDim>;
  // v, then P, then dS: two blocks of 64 channels fit on a multiprocessor.
  static constexpr int kPairsAt = 3 * kTileBytes;  // after k, q and g
  static constexpr int kPairBytes = std::max(kTileBytes, kSplitBytes<kDiagTile, kDiagTile>);
  static constexpr int kSharesAt = kPairsAt + kPairBytes;
  static constexpr int kShared =
      kSharesAt + kDiagTile * kHalves * static_cast<int>(sizeof(RowShare));
};

// A warp's part of a tile in shared memory.
template <int kDim>
struct FloatDiagPart {
  using Shape = FloatDiagBackwardShape<kDim>;
  static constexpr int kCount = kDim / 2 / 8;  // results of 8 channels

  unsigned char* shared;
  int first;  // of its 16 rows, and of its 16 keys in the sums over rows
  int half;   // of the keys, and of the channels

  __device__ unsigned char* k() const { return shared; }
  __device__ unsigned char* q() const { return shared + Shape::kTileBytes; }
  __device__ unsigned char* g() const { return shared + 2 * Shape::kTileBytes; }
  __device__ unsigned char* pairs() const { return shared + Shape::kPairsAt; }  // and v

  // x y^T for rows of x and keys of y.
  __device__ void multiply(float (&acc)[4][4], const unsigned char* x,
                           const unsigned char* y) const {
    multiply_split_rows<kDiagTile, kDim, true, kDiagTile>(acc, x, first, y, 4 * half);
  }

  // Scores become P, and dP becomes dS. All warps meet, after which v has been read.
  __device__ void soften(float (&s)[4][4], float (&dp)[4][4], const FloatDiagTile& tile,
                         float scale) const {
    const int lane = threadIdx.x & 31, t = lane & 3;
    RowShare* const shares = reinterpret_cast<RowShare*>(shared + Shape::kSharesAt);
    float own_top[2];
    std::uint64_t seen[2];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int row = first + (lane >> 2) + 8 * h;
      seen[h] = tile.seen(row) >> (32 * half + 2 * t);
      float top = kNoExponent, mass = 0, dot = 0;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const bool sees = ((seen[h] >> (i / 2 * 8 + i % 2)) & 1) != 0;
        float& x = s[i / 2][2 * h + i % 2];
        float& y = dp[i / 2][2 * h + i % 2];
        x = sees ? x : -INFINITY;
        y = sees ? y : 0;
        top = fmaxf(top, x);
      }
      top = quad_max(top);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        float& x = s[i / 2][2 * h + i % 2];
        x = exp2_fast((x - top) * scale * kLog2E);
        mass += x;
        dot = fmaf(x, dp[i / 2][2 * h + i % 2], dot);
      }
      own_top[h] = top;
      mass = quad_sum(mass);
      dot = quad_sum(dot);
      if (t == 0) {
        *reinterpret_cast<float4*>(shares + row * Shape::kHalves + half) = {top, mass, dot, 0};
      }
    }
    __syncthreads();
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const RowShare* const both = shares + (first + (lane >> 2) + 8 * h) * Shape::kHalves;
      const float top = fmaxf(both[0].top, both[1].top);
      const float low = exp2_fast((both[0].top - top) * scale * kLog2E);
      const float high = exp2_fast((both[1].top - top) * scale * kLog2E);
      const float inverse = inverse_of(both[0].mass * low + both[1].mass * high);
      const float delta = (both[0].dot * low + both[1].dot * high) * inverse;
      const float weight = exp2_fast((own_top[h] - top) * scale * kLog2E) * inverse;
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const bool sees = ((seen[h] >> (i / 2 * 8 + i % 2)) & 1) != 0;
        float& x = s[i / 2][2 * h + i % 2];
        float& y = dp[i / 2][2 * h + i % 2];
        x *= weight;
        y = sees ? scale * x * (y - delta) : 0;
      }
    }
  }

  // P or dS, [row, key].
  __device__ void write_pairs(const float (&x)[4][4]) const {
    write_split_results<kDiagTile, kDiagTile>(pairs(), first, 4 * half, x);
  }

  // acc += pairs y or, where kTransposed, pairs^T y.
  template <bool kTransposed>
  __device__ void multiply_pairs(float (&acc)[kCount][4], const unsigned char* y,
                                 const FloatDiagTile& tile) const {
    const int lane = threadIdx.x & 31, low = lane & 7;
    const int middle = (lane >> 3) & 1, high = lane >> 4;
#pragma unroll 1
    for (int step = 0; step < kDiagTile / 16; ++step) {
      if (!tile.meets(first, step)) continue;
      const std::uint32_t at =
          kTransposed ? tile_offset<kDiagTile>(16 * step + 8 * high + low, first / 8 + middle)
                      : tile_offset<kDiagTile>(first + (lane & 15), 2 * step + high);
      Split a[4];
      load_split<kSplitPart<kDiagTile, kDiagTile>, kTransposed>(a, shared_address(pairs()) + at);
      multiply_split_step<kDim, false, kDiagTile>(acc, a, y, step, half * kCount);
    }
  }
};

// The rows of one query head and the keys of a tile.
struct FloatDiagTensors {
  const float *q, *g, *k, *v;
  float* dq;
  std::int64_t head;
};

// q, g and v of a head into shared memory, and with the first head k. Keys that do not count and
// rows that see none become zeros, whatever they hold.
template <int kDim>
__device__ inline void load_float_diag(const FloatDiagPart<kDim>& part, const DeviceCall& call,
                                       const DeviceSequence& sequence, const FloatDiagTile& tile,
                                       const FloatDiagTensors& at, bool with_k) {
  for_each_slice<kDim>([&](int rows, int slice) {
    const auto valid = [&](int j) { return tile.key(j); };
    const auto seeing = [&](int row) { return tile.seen(row) != 0; };
    const int channel = 32 * slice, dim = static_cast<int>(call.dim) - channel,
              dim_v = static_cast<int>(call.dim_v) - channel;
    RowFloats<32> x, y;
    load_float_rows_if<32>(x, at.q + channel, call.q.token, rows, dim, seeing);
    load_float_rows_if<32>(y, at.g + channel, call.g.token, rows, dim_v, seeing);
    weigh_float_rows(y, call.diag_weight, sequence, at.head, tile.begin, rows, tile.count, channel,
                     static_cast<int>(call.dim_v));
    write_split_rows<kDiagTile, kDim>(part.q(), rows, slice, x);
    write_split_rows<kDiagTile, kDim>(part.g(), rows, slice, y);
    load_float_rows_if<32>(y, at.v + channel, call.v.token, rows, dim_v, valid);
    if (with_k) {
      load_float_rows_if<32>(x, at.k + channel, call.k.token, rows, dim, valid);
      write_split_rows<kDiagTile, kDim>(part.k(), rows, slice, x);
    }
    write_split_rows<kDiagTile, kDim>(part.pairs(), rows, slice, y);
  });
}

// One block per key job and key head: the tiles that begin in it.
template <int kDim>
__global__ void __launch_bounds__(256, kDim <= 64 ? 2 : 1)
    float_diag_backward(const __grid_constant__ TiledCall tiled) {
  using Part = FloatDiagPart<kDim>;
  LLN_DYNAMIC_SHARED(shared);
  const DeviceCall& call = tiled.call;
  const KeyRows piece = key_rows(tiled);
  if (piece.s < 0) return;
  const DeviceSequence& seq = piece.sequence;
  const FloatDiagWalk walk(tiled, seq);
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = threadIdx.x & 31;
  const Part part{shared, warp % 4 * 16, warp / 4};
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const int column = part.half * (kDim / 2);
  const float scale = 1 / sqrtf(static_cast<float>(call.channels));
  const bool add = tiled.adds;
  const auto group = static_cast<int>(call.heads / call.heads_k);
  wait_for_previous();
  let_next_start();
  const std::int64_t end = piece.begin + piece.count;
  for (std::int64_t begin = walk.first(piece.begin); begin < end; begin = walk.next(begin)) {
    const FloatDiagTile tile = walk.at(begin);
    const auto rows_of = [&](const Rows& tensor, std::int64_t head, std::int64_t token) {
      return static_cast<float*>(tensor.data) + seq.batch * tensor.batch + head * tensor.head +
             (token + begin) * tensor.token;
    };
    float dk[Part::kCount][4] = {}, dv[Part::kCount][4] = {};
    for (int i = 0; i < group; ++i) {
      const std::int64_t head = piece.head * group + i;
      const FloatDiagTensors at{
          rows_of(call.q, head, seq.q_begin),       rows_of(call.g, head, seq.q_begin),
          rows_of(call.k, piece.head, seq.k_begin), rows_of(call.v, piece.head, seq.k_begin),
          rows_of(call.dq, head, seq.q_begin),      head};
      __syncthreads();  // what was there has been read
      load_float_diag<kDim>(part, call, seq, tile, at, i == 0);
      __syncthreads();
      float s[4][4] = {}, dp[4][4] = {};
      part.multiply(s, part.q(), part.k());
      part.multiply(dp, part.g(), part.pairs());
      part.soften(s, dp, tile, scale);
      part.write_pairs(s);
      __syncthreads();
      part.template multiply_pairs<true>(dv, part.g(), tile);
      __syncthreads();
      part.write_pairs(dp);
      __syncthreads();
      part.template multiply_pairs<true>(dk, part.q(), tile);
      float dq[Part::kCount][4] = {};
      part.template multiply_pairs<false>(dq, part.k(), tile);
      put_float_rows(at.dq, call.dq.token, part.first, tile.count, column, dim, dq, add);
    }
    // Keys that do not count have zero gradients, whatever rows hold.
    const int key = part.first + (lane >> 2);
    const bool valid[2] = {tile.key(key), tile.key(key + 8)};
    zero_rows(dk, valid);
    zero_rows(dv, valid);
    put_float_rows(rows_of(call.dk, piece.head, seq.k_begin), call.dk.token, part.first, tile.count,
                   column, dim, dk, add);
    put_float_rows(rows_of(call.dv, piece.head, seq.k_begin), call.dv.token, part.first, tile.count,
                   column, dim_v, dv, add);
  }
}

}  // namespace lln::cuda
