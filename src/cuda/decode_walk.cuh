// A block walks tokens of one slot in chunks of 16, for 64 columns of its values: rows of a chunk
// read the state before it and the keys of the chunk up to themselves, then the chunk joins the
// state. Weights inside a chunk are evaluated as they are, sum over l of 2^(a_il + u_jl - high_i):
// with so few keys that costs no more than the products with the state, and no key, however large,
// can hide another, so that nothing is to be checked and no chunk to be taken apart.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/decode_call.cuh"

namespace lln::cuda {

inline constexpr int kWalkThreads = 128;
inline constexpr int kWalkWarps = kWalkThreads / 32;
inline constexpr int kWalkChunk = 16;
inline constexpr int kWalkColumns = 64;  // two for each lane
inline constexpr int kWalkRows = kWalkChunk / kWalkWarps;
inline constexpr int kLaneChannels = 8;  // 256 channels over 32 lanes

struct WalkShared {
  float* c;        // [dp, kWalkColumns]: C
  float *m, *s;    // [dp]
  float* keep;     // [dp]: what the state before a chunk is of the state after it
  float* u;        // [kWalkChunk, dp]: exponents of the keys, then their shares of the new state
  float* high;     // [kWalkChunk, dp]: the largest exponent up to a key, the state's included
  float* v;        // [kWalkChunk, kWalkColumns]
  float* w;        // [kWalkChunk, dp]: weights of the state
  float* p;        // [kWalkChunk, kWalkChunk]: weights of the keys of a chunk
  float* block_k;  // [kWalkChunk, dp]: keys of a diagonal block
  float* block_v;  // [kWalkChunk, kWalkColumns]
};

inline __host__ __device__ std::int64_t walk_floats(const DecodeShape& shape, bool rows) {
  std::int64_t floats = shape.dp * (kWalkColumns + 3 + 2 * kWalkChunk) + kWalkChunk * kWalkColumns;
  if (rows) floats += kWalkChunk * (shape.dp + kWalkChunk);
  if (rows && shape.block > 0) floats += kWalkChunk * (shape.dp + kWalkColumns);
  return floats;
}

__device__ inline WalkShared walk_shared(const DecodeShape& shape, float* memory) {
  WalkShared sh;
  const auto take = [&](std::int64_t count) {
    float* const taken = memory;
    memory += count;
    return taken;
  };
  sh.c = take(shape.dp * kWalkColumns);
  sh.m = take(shape.dp);
  sh.s = take(shape.dp);
  sh.keep = take(shape.dp);
  sh.u = take(kWalkChunk * shape.dp);
  sh.high = take(kWalkChunk * shape.dp);
  sh.v = take(kWalkChunk * kWalkColumns);
  sh.w = take(kWalkChunk * shape.dp);
  sh.p = take(kWalkChunk * kWalkChunk);
  sh.block_k = take(kWalkChunk * shape.dp);
  sh.block_v = take(kWalkChunk * kWalkColumns);
  return sh;
}

// The sums over a warp of 16 numbers of each lane; a lane gets the one of index lane / 2.
__device__ inline float warp_sums(float (&x)[kWalkChunk]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = kWalkChunk / 2, other = 16; half > 0; half /= 2, other /= 2) {
    const bool upper = (lane & other) != 0;
#pragma unroll
    for (int i = 0; i < half; ++i) {
      const float give = upper ? x[i] : x[i + half];
      const float take = upper ? x[i + half] : x[i];
      x[i] = take + __shfl_xor_sync(kAllLanes, give, other);
    }
  }
  return x[0] + __shfl_xor_sync(kAllLanes, x[0], 1);
}
static_assert(kWalkChunk == 16, "warp_sums() halves 16 numbers four times");

// acc[r] += x[r, 0..depth) tile[0..depth, 2 lane .. + 1]; rows of x lie `ld` apart, depth is a
// multiple of 4.
__device__ inline void multiply_rows(float2 (&acc)[kWalkRows], const float* x, int ld, int depth,
                                     const float* tile) {
  const int lane = threadIdx.x % 32;
  for (int l = 0; l < depth; l += 4) {
    float2 c[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      c[i] = *reinterpret_cast<const float2*>(tile + (l + i) * kWalkColumns + 2 * lane);
    }
#pragma unroll
    for (int r = 0; r < kWalkRows; ++r) {
      const float4 w = *reinterpret_cast<const float4*>(x + r * ld + l);
      acc[r].x =
          fmaf(w.x, c[0].x, fmaf(w.y, c[1].x, fmaf(w.z, c[2].x, fmaf(w.w, c[3].x, acc[r].x))));
      acc[r].y =
          fmaf(w.x, c[0].y, fmaf(w.y, c[1].y, fmaf(w.z, c[2].y, fmaf(w.w, c[3].y, acc[r].y))));
    }
  }
}

class Walk {
 public:
  __device__ Walk(const DecodeCall& c, float* memory, std::int64_t slot, int piece)
      : c_(c),
        sh_(walk_shared(c.shape, memory)),
        slot_(c.shape.slot(c.state, slot)),
        sequence_(slot / c.call.heads_k),
        head_k_(slot % c.call.heads_k),
        before_(c.tokens[slot]),
        d_(static_cast<int>(c.shape.d)),
        dp_(static_cast<int>(c.shape.dp)),
        column_(piece * kWalkColumns),
        lane_(static_cast<int>(threadIdx.x) % 32),
        warp_(static_cast<int>(threadIdx.x) / 32) {}

  // From a set of keys, or from none.
  __device__ void begin(const KeySet* set) {
    for (int l = static_cast<int>(threadIdx.x); l < dp_; l += kWalkThreads) {
      sh_.m[l] = set != nullptr && l < d_ ? set->m[l] : kNoReference;
      sh_.s[l] = set != nullptr && l < d_ ? set->s[l] : 0;
    }
    for (int l = warp_; l < dp_; l += kWalkWarps) {
      for (int i = lane_; i < kWalkColumns; i += 32) {
        const bool there = set != nullptr && l < d_ && column_ + i < c_.shape.dvp;
        sh_.c[l * kWalkColumns + i] = there ? set->values[l * c_.shape.dvp + column_ + i] : 0;
      }
    }
    __syncthreads();
  }

  // Tokens [first, first + count) of the call, at most kWalkChunk, which come next.
  template <bool kRead>
  __device__ void chunk(std::int64_t first, int count) {
    load_keys(first, count);
    __syncthreads();
    find_highest();
    __syncthreads();
    if constexpr (kRead) {
      const std::int64_t group = c_.call.heads / c_.call.heads_k;
      for (std::int64_t g = 0; g < group; ++g) read(head_k_ * group + g, first, count);
      __syncthreads();
    }
    share_mass();
    __syncthreads();
    add_values();
    __syncthreads();
  }

  __device__ void store(const KeySet& set) const {
    for (int l = static_cast<int>(threadIdx.x); l < d_ && column_ == 0; l += kWalkThreads) {
      set.m[l] = sh_.m[l];
      set.s[l] = sh_.s[l];
    }
    for (int l = warp_; l < d_; l += kWalkWarps) {
      for (int i = lane_; i < kWalkColumns && column_ + i < c_.shape.dvp; i += 32) {
        set.values[l * c_.shape.dvp + column_ + i] = sh_.c[l * kWalkColumns + i];
      }
    }
  }

 private:
  __device__ float key_number(std::int64_t token, int l) const {
    const DeviceCall& call = c_.call;
    return load_number(call.k, call.dtype, row_at(call.k, sequence_, head_k_, token) + l);
  }

  __device__ float value_number(std::int64_t token, int i) const {
    const DeviceCall& call = c_.call;
    if (column_ + i >= c_.shape.dv) return 0;
    return load_number(call.v, call.dtype, row_at(call.v, sequence_, head_k_, token) + column_ + i);
  }

  // Rows past the last key have no weight.
  __device__ void load_keys(std::int64_t first, int count) {
    const float beta = scale_at(c_.call.beta, sequence_, head_k_);
    for (int j = warp_; j < kWalkChunk; j += kWalkWarps) {
      for (int l = lane_; l < dp_; l += 32) {
        const bool there = j < count && l < d_;
        sh_.u[j * dp_ + l] = there ? exponent(c_.call, beta, key_number(first + j, l)) : -INFINITY;
      }
      for (int i = lane_; i < kWalkColumns; i += 32) {
        sh_.v[j * kWalkColumns + i] = j < count ? value_number(first + j, i) : 0;
      }
    }
  }

  __device__ void find_highest() {
    for (int l = static_cast<int>(threadIdx.x); l < dp_; l += kWalkThreads) {
      float high = sh_.m[l];
      for (int j = 0; j < kWalkChunk; ++j) {
        high = fmaxf(high, sh_.u[j * dp_ + l]);
        sh_.high[j * dp_ + l] = high;
      }
    }
  }

  // A warp makes kWalkRows rows of a query head from their weights to their sums.
  __device__ void read(std::int64_t head, std::int64_t first, int count) {
    const int own = warp_ * kWalkRows;
    for (int i = own; i < own + kWalkRows; ++i) weigh(head, first, i, count);
    __syncwarp();
    float2 acc[kWalkRows] = {};
    multiply_rows(acc, sh_.w + own * dp_, dp_, dp_, sh_.c);
    multiply_rows(acc, sh_.p + own * kWalkChunk, kWalkChunk, kWalkChunk, sh_.v);
    __syncwarp();
    if (c_.shape.block > 0) add_block(head, first, count, acc);
    const Rows& o = c_.call.o;
    for (int r = 0; r < kWalkRows && own + r < count; ++r) {
      const std::int64_t at = row_at(o, sequence_, head, first + own + r);
      const int i = column_ + 2 * lane_;
      if (i < c_.shape.dv) store_number(o, c_.call.dtype, at + i, acc[r].x);
      if (i + 1 < c_.shape.dv) store_number(o, c_.call.dtype, at + i + 1, acc[r].y);
    }
  }

  // w[i, :] and p[i, :], which together sum to one. Rows from `count` on have no weights.
  __device__ void weigh(std::int64_t head, std::int64_t first, int i, int count) {
    const DeviceCall& call = c_.call;
    float a[kLaneChannels];
    float high = kNoReference;
    const float alpha = scale_at(call.alpha, sequence_, head);
    const std::int64_t at = row_at(call.q, sequence_, head, first + i);
#pragma unroll
    for (int t = 0; t < kLaneChannels; ++t) {
      const int l = lane_ + 32 * t;
      a[t] = -INFINITY;
      if (i >= count || l >= d_) continue;
      a[t] = exponent(call, alpha, load_number(call.q, call.dtype, at + l));
      high = fmaxf(high, a[t] + sh_.high[i * dp_ + l]);
    }
    high = warp_max(high);
    float mass = 0;
    float part[kWalkChunk] = {};
#pragma unroll
    for (int t = 0; t < kLaneChannels; ++t) {
      const int l = lane_ + 32 * t;
      if (i >= count || l >= d_) continue;
      mass += sh_.s[l] * exp2f(a[t] + sh_.m[l] - high);
      const float shifted = a[t] - high;
#pragma unroll
      for (int j = 0; j < kWalkChunk; ++j) {
        if (j <= i) part[j] += exp2f(shifted + sh_.u[j * dp_ + l]);
      }
    }
    const float p = warp_sums(part);
    const float total = warp_sum(mass + (lane_ % 2 == 0 ? p : 0));
    const float inverse = i < count ? 1 / total : 0;
    if (lane_ % 2 == 0) sh_.p[i * kWalkChunk + lane_ / 2] = p * inverse;
#pragma unroll
    for (int t = 0; t < kLaneChannels; ++t) {
      const int l = lane_ + 32 * t;
      if (l >= dp_) continue;
      const bool there = i < count && l < d_;
      sh_.w[i * dp_ + l] = there ? inverse * sh_.s[l] * exp2f(a[t] + sh_.m[l] - high) : 0;
    }
  }

  // acc = w1 acc + w2 softmax(q k^T / sqrt(d)) v over the keys of each row's block up to itself,
  // which lie in the slot where they came with earlier calls. Averages at every moment, so that no
  // sum of large values overflows.
  __device__ void add_block(std::int64_t head, std::int64_t first, int count,
                            float2 (&acc)[kWalkRows]) {
    const std::int64_t block = c_.shape.block, position = before_ + first;
    const std::int64_t start = position - position % block;
    const int own = warp_ * kWalkRows;
    float2 mean[kWalkRows] = {};
    float top[kWalkRows], sum[kWalkRows] = {};
    std::int64_t lowest[kWalkRows];  // position of the first key that a row sees
#pragma unroll
    for (int r = 0; r < kWalkRows; ++r) {
      top[r] = -INFINITY;
      lowest[r] = position + own + r - (position + own + r) % block;
    }
    for (std::int64_t keys = start; keys < position + count; keys += kWalkChunk) {
      __syncthreads();
      load_block(keys, position + count);
      __syncthreads();
#pragma unroll
      for (int r = 0; r < kWalkRows; ++r) {
        const std::int64_t row = position + own + r;
        const std::int64_t key = keys + lane_ / 2;
        const bool sees = own + r < count && key >= lowest[r] && key <= row;
        const float score = sees_score(head, first + own + r, own + r < count);
        const float high = fmaxf(top[r], warp_max(sees ? score : -INFINITY));
        const float p = sees ? exp2f(score - high) : 0;
        const float old = sum[r] == 0 ? 0 : sum[r] * exp2f(top[r] - high);
        sum[r] = old + warp_sum(lane_ % 2 == 0 ? p : 0);
        top[r] = high;
        const float inverse = sum[r] == 0 ? 0 : 1 / sum[r];
        if (lane_ % 2 == 0) sh_.p[(own + r) * kWalkChunk + lane_ / 2] = p * inverse;
        mean[r].x *= old * inverse;
        mean[r].y *= old * inverse;
      }
      __syncwarp();
      multiply_rows(mean, sh_.p + own * kWalkChunk, kWalkChunk, kWalkChunk, sh_.block_v);
      __syncwarp();
    }
    mix(head, first, count, acc, mean);
  }

  // The score of a row and key lane / 2 of the tile, in units of log2.
  __device__ float sees_score(std::int64_t head, std::int64_t row, bool there) const {
    const DeviceCall& call = c_.call;
    const float scale = kLog2OfE / sqrtf(static_cast<float>(d_));
    const std::int64_t at = row_at(call.q, sequence_, head, row);
    float part[kWalkChunk] = {};
    for (int l = lane_; there && l < d_; l += 32) {
      const float q = load_number(call.q, call.dtype, at + l) * scale;
#pragma unroll
      for (int j = 0; j < kWalkChunk; ++j) part[j] = fmaf(q, sh_.block_k[j * dp_ + l], part[j]);
    }
    return warp_sums(part);
  }

  // Keys and values at positions [keys, keys + kWalkChunk) of the sequence, zeros from `end` on.
  __device__ void load_block(std::int64_t keys, std::int64_t end) {
    const std::int64_t block = c_.shape.block;
    for (int j = warp_; j < kWalkChunk; j += kWalkWarps) {
      const std::int64_t key = keys + j;
      const bool kept = key < before_;
      const std::int64_t at = kept ? key % block : key - before_;
      for (int l = lane_; l < d_; l += 32) {
        float x = 0;
        if (key < end) x = kept ? slot_.block_k[at * c_.shape.dp + l] : key_number(at, l);
        sh_.block_k[j * dp_ + l] = x;
      }
      for (int i = lane_; i < kWalkColumns; i += 32) {
        float x = 0;
        if (key < end && column_ + i < c_.shape.dv) {
          x = kept ? slot_.block_v[at * c_.shape.dvp + column_ + i] : value_number(at, i);
        }
        sh_.block_v[j * kWalkColumns + i] = x;
      }
    }
  }

  __device__ void mix(std::int64_t head, std::int64_t first, int count, float2 (&acc)[kWalkRows],
                      const float2 (&mean)[kWalkRows]) const {
    const int own = warp_ * kWalkRows;
    const auto mixed = [&](float lln, float diag, int r, int i) {
      if (own + r >= count || column_ + i >= c_.shape.dv) return 0.0F;
      const auto at = [&](const Weight& weight) {
        return weight_at(weight, sequence_, head, first + own + r, column_ + i);
      };
      return at(c_.call.lln_weight) * lln + at(c_.call.diag_weight) * diag;
    };
#pragma unroll
    for (int r = 0; r < kWalkRows; ++r) {
      acc[r].x = mixed(acc[r].x, mean[r].x, r, 2 * lane_);
      acc[r].y = mixed(acc[r].y, mean[r].y, r, 2 * lane_ + 1);
    }
  }

  // (m, s) of the state with the chunk; u becomes the shares of its keys.
  __device__ void share_mass() {
    for (int l = static_cast<int>(threadIdx.x); l < dp_; l += kWalkThreads) {
      if (l >= d_) {
        sh_.keep[l] = 0;
        for (int j = 0; j < kWalkChunk; ++j) sh_.u[j * dp_ + l] = 0;
        continue;
      }
      const float high = sh_.high[(kWalkChunk - 1) * dp_ + l];
      const float old = sh_.s[l] == 0 ? 0 : sh_.s[l] * exp2f(sh_.m[l] - high);
      float e[kWalkChunk];
      float sum = old;
#pragma unroll
      for (int j = 0; j < kWalkChunk; ++j) {
        e[j] = exp2f(sh_.u[j * dp_ + l] - high);
        sum += e[j];
      }
      const float inverse = 1 / sum;
#pragma unroll
      for (int j = 0; j < kWalkChunk; ++j) sh_.u[j * dp_ + l] = e[j] * inverse;
      sh_.keep[l] = old * inverse;
      sh_.m[l] = high;
      sh_.s[l] = sum;
    }
  }

  // C = keep C + shares^T v.
  __device__ void add_values() {
    for (int l = 4 * warp_; l < dp_; l += 4 * kWalkWarps) {
      float2 c[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 old =
            *reinterpret_cast<const float2*>(sh_.c + (l + i) * kWalkColumns + 2 * lane_);
        c[i] = {sh_.keep[l + i] * old.x, sh_.keep[l + i] * old.y};
      }
#pragma unroll
      for (int j = 0; j < kWalkChunk; ++j) {
        const float4 share = *reinterpret_cast<const float4*>(sh_.u + j * dp_ + l);
        const float2 v = *reinterpret_cast<const float2*>(sh_.v + j * kWalkColumns + 2 * lane_);
        c[0] = {fmaf(share.x, v.x, c[0].x), fmaf(share.x, v.y, c[0].y)};
        c[1] = {fmaf(share.y, v.x, c[1].x), fmaf(share.y, v.y, c[1].y)};
        c[2] = {fmaf(share.z, v.x, c[2].x), fmaf(share.z, v.y, c[2].y)};
        c[3] = {fmaf(share.w, v.x, c[3].x), fmaf(share.w, v.y, c[3].y)};
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        *reinterpret_cast<float2*>(sh_.c + (l + i) * kWalkColumns + 2 * lane_) = c[i];
      }
    }
  }

  const DecodeCall& c_;
  WalkShared sh_;
  DecodeSlot slot_;
  std::int64_t sequence_, head_k_;
  std::int64_t before_;  // tokens that the sequence had seen
  int d_, dp_, column_, lane_, warp_;
};

}  // namespace lln::cuda
