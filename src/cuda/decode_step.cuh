// One block and one slot of a decode state: tokens one at a time, and rows that read the state. A
// key changes every channel's average by C += (e/s)(v - C), and a row is a weighted sum of
// averages, so both happen in one pass over the state: the row's weights need nothing but (m, s),
// which are updated first. The sums of all keys are read, those of recent keys read and written.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/decode_call.cuh"
#include "cuda/instructions.cuh"

namespace lln::cuda {

inline constexpr int kStepThreads = 256;
inline constexpr int kStepWarps = kStepThreads / 32;
// Rows of 4 columns of each set that a thread has under way at once. At 64 x 64 channels that is
// all of the state, so that its loads begin before the weights of the row are known.
inline constexpr int kStepBatch = 4;
inline constexpr int kStepKeys = 256;  // of the running block, scored at once
// A reference is raised only by keys that exceed it by so much; s is at least 1 then.
inline constexpr float kReferenceSlack = 8;
// Differences of values up to this cannot overflow.
inline constexpr float kLargeValue = 0x1p90F;

template <int kRows>
struct StepShared {
  float4 partial[kRows][kStepThreads];
  float share[kStepThreads], first[kStepThreads], second[kStepThreads];  // of each channel
  alignas(16) float value[kStepThreads];
  float weights[kRows][kStepThreads], recent_weights[kRows][kStepThreads];
  float queries[kRows][kStepThreads];  // scaled for the scores of the block
  float scores[kRows][kStepKeys];
  float keep[kRows];
  float2 masses[kRows][kStepWarps];
};

__device__ inline void add_scaled(float4& to, float factor, const float4& x) {
  to.x = fmaf(factor, x.x, to.x);
  to.y = fmaf(factor, x.y, to.y);
  to.z = fmaf(factor, x.z, to.z);
  to.w = fmaf(factor, x.w, to.w);
}

__device__ inline float4 scaled(float factor, const float4& x) {
  return {factor * x.x, factor * x.y, factor * x.z, factor * x.w};
}

// C + share (v - C); where the difference may overflow, (1 - share) C + share v, which is made to
// lie between C and v however it is rounded.
__device__ inline float blend(float c, float v, float share) {
  if (fabsf(v) <= kLargeValue) return fmaf(share, v - c, c);
  const float mixed = fmaf(1 - share, c, share * v);
  return mixed != mixed ? mixed : fminf(fmaxf(mixed, fminf(c, v)), fmaxf(c, v));
}

__device__ inline float4 blend(const float4& c, const float4& v, float share) {
  return {blend(c.x, v.x, share), blend(c.y, v.y, share), blend(c.z, v.z, share),
          blend(c.w, v.w, share)};
}

// A key with exponent u joins the mass (m, s) of a channel; its share of the new mass.
__device__ inline float add_key(float& m, float& s, float u) {
  if (u > m + kReferenceSlack) {
    s *= exp2f(m - u);
    m = u;
  }
  const float e = exp2f(u - m);
  s += e;
  return e / s;
}

// The sums of the slots that blocks after the first `resident` ones take begin their way to the
// second-level cache at once: memory has no pause while blocks change.
__device__ inline void prefetch_later_slots(const DecodeCall& c, unsigned resident) {
  if (blockIdx.x >= resident || threadIdx.x > 1) return;
  const auto bytes = static_cast<unsigned>(c.shape.d * c.shape.dvp * sizeof(float));
  for (unsigned later = blockIdx.x + resident; later < gridDim.x; later += resident) {
    const DecodeSlot slot = c.shape.slot(c.state, later);
    const float* const values = threadIdx.x == 0 ? slot.all.values : slot.recent.values;
    prefetch_l2(values, bytes);
  }
}

// kBlock: there is a diagonal part.
template <int kRows, bool kBlock>
class StepHead {
  static_assert(kRows <= kStepWarps, "a warp takes the scores of a row");

 public:
  __device__ StepHead(const DecodeCall& c, StepShared<kRows>& shared, unsigned slot)
      : c_(c),
        sh_(shared),
        index_(slot),
        sequence_(slot / static_cast<unsigned>(c.call.heads_k)),
        head_k_(slot % static_cast<unsigned>(c.call.heads_k)),
        group_(static_cast<unsigned>(c.call.heads) / static_cast<unsigned>(c.call.heads_k)),
        slot_(c.shape.slot(c.state, slot)),
        tokens_(c.tokens[slot]),
        d_(static_cast<int>(c.shape.d)),
        dvp_(static_cast<int>(c.shape.dvp)),
        columns_(dvp_ / 4),
        at_once_(kStepThreads / columns_),
        column_(static_cast<int>(threadIdx.x) % columns_),
        first_(static_cast<int>(threadIdx.x) / columns_) {
    if (is_channel()) {
      all_ = {slot_.all.m[threadIdx.x], slot_.all.s[threadIdx.x]};
      recent_ = {slot_.recent.m[threadIdx.x], slot_.recent.s[threadIdx.x]};
    }
    load_batch(0);
    if constexpr (kBlock) block_keys_ = c.shape.block_tokens(tokens_);
  }

  // Token `i` of the call, the next one of its sequence; and its rows where the call has rows.
  __device__ void add(std::int64_t i) {
    // Nothing is computed before all of the call's numbers are asked for.
    const Tile first{0, i, 1, 0, static_cast<int>(min(group_, unsigned{kRows}))};
    if (batch_ < 0) load_batch(0);
    const NewToken token = load_token(i);
    if (c_.rows) load_queries(first);
    fold_ = tokens_ % kRecentTokens == 0;
    if constexpr (kBlock) {
      if (block_keys_ == c_.shape.block) block_keys_ = 0;
    }
    add_mass(token);
    store_value(token);
    ++tokens_;
    ++block_keys_;
    if (!c_.rows) {
      __syncthreads();
      float4 part[kRows];
      pass<true, false>(part);
      __syncthreads();
      return;
    }
    read_rows<true>();
    for (unsigned head = kRows; head < group_; head += kRows) {
      load_queries({head, i, 1, 0, static_cast<int>(min(group_ - head, unsigned{kRows}))});
      read_rows<false>();
    }
  }

  // Up to kRows rows: neighbours in one query head of the group, or one row of neighbouring heads.
  struct Tile {
    unsigned head;     // of the group, of the first row
    std::int64_t row;  // of the call
    int head_step, row_step;
    int count;
  };

  __device__ void read(const Tile& tile) {
    load_queries(tile);
    read_rows<false>();
  }

  // (m, s) and the count; C and the running block are there already.
  __device__ void store() {
    if (is_channel()) {
      slot_.all.m[threadIdx.x] = all_.m;
      slot_.all.s[threadIdx.x] = all_.s;
      slot_.recent.m[threadIdx.x] = recent_.m;
      slot_.recent.s[threadIdx.x] = recent_.s;
    }
    if (threadIdx.x == 0) c_.tokens[index_] = tokens_;
  }

 private:
  struct Mass {
    float m, s;
  };

  __device__ bool is_channel() const { return threadIdx.x < static_cast<unsigned>(d_); }
  __device__ std::int64_t head_of(int r) const {
    return std::int64_t{head_k_} * group_ + tile_.head + r * tile_.head_step;
  }
  __device__ std::int64_t row_of(int r) const { return tile_.row + r * tile_.row_step; }

  // Channel threadIdx.x of a key and of its value, as bits.
  struct NewToken {
    std::uint32_t key, value;
    float beta;
  };

  __device__ NewToken load_token(std::int64_t i) const {
    const DeviceCall& call = c_.call;
    NewToken token{0, 0, scale_at(call.beta, sequence_, head_k_)};
    if (is_channel()) {
      token.key =
          load_bits(call.k, call.dtype, row_at(call.k, sequence_, head_k_, i) + threadIdx.x);
    }
    if (threadIdx.x < static_cast<unsigned>(c_.shape.dv)) {
      token.value =
          load_bits(call.v, call.dtype, row_at(call.v, sequence_, head_k_, i) + threadIdx.x);
    }
    return token;
  }

  // Channel threadIdx.x of the rows that are read next.
  __device__ void load_queries(const Tile& tile) {
    const DeviceCall& call = c_.call;
    tile_ = tile;
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      queries_[r] = 0;
      alpha_[r] = 0;
      if (r >= tile_.count) continue;
      alpha_[r] = scale_at(call.alpha, sequence_, head_of(r));
      if (!is_channel()) continue;
      const std::int64_t at = row_at(call.q, sequence_, head_of(r), row_of(r));
      queries_[r] = load_bits(call.q, call.dtype, at + threadIdx.x);
    }
  }

  // kAdd: the new value joins C in the same pass.
  template <bool kAdd>
  __device__ void read_rows() {
    make_weights();
    float4 part[kRows];
    pass<kAdd, true>(part);
    float lln[kRows], diag[kRows];
    sum_columns(part, lln);
    if constexpr (kBlock) {
      read_block(part);
      sum_columns(part, diag);
    }
    write_rows(lln, diag);
  }

  // (m, s) of channel threadIdx.x with the new key, and its share of the new averages. Where
  // `recent` is full it joins `all` first; C follows in the pass.
  __device__ void add_mass(const NewToken& token) {
    if (!is_channel()) return;
    if (fold_) {
      const JoinedMass joined = join_mass<float>(all_.m, all_.s, recent_.m, recent_.s);
      all_ = {joined.m, joined.s};
      recent_ = {kNoReference, 0};
      sh_.first[threadIdx.x] = joined.first;
      sh_.second[threadIdx.x] = joined.second;
    }
    const float x = bits_number(token.key, c_.call.dtype);
    sh_.share[threadIdx.x] = add_key(recent_.m, recent_.s, exponent(c_.call, token.beta, x));
    if constexpr (kBlock) slot_.block_k[block_keys_ * c_.shape.dp + threadIdx.x] = x;
  }

  __device__ void store_value(const NewToken& token) {
    const float x = bits_number(token.value, c_.call.dtype);
    sh_.value[threadIdx.x] = x;
    if constexpr (kBlock) {
      if (threadIdx.x < static_cast<unsigned>(c_.shape.dv)) {
        slot_.block_v[block_keys_ * dvp_ + threadIdx.x] = x;
      }
    }
  }

  // The weights of the rows, the softmax over channels of a + c, in two parts: of the keys in `all`
  // and of those in `recent`. They are 2^(a + m - high) s, normalised: no logarithm of s is taken.
  __device__ void make_weights() {
    const DeviceCall& call = c_.call;
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const int warps = (d_ + 31) / 32;
    float a[kRows];
    if (warp < warps) {
      const float score_scale = kLog2OfE / sqrtf(static_cast<float>(d_));
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const float x = bits_number(queries_[r], call.dtype);
        if constexpr (kBlock) sh_.queries[r][threadIdx.x] = x * score_scale;
        a[r] = exponent(call, alpha_[r], x);
        const float top = warp_max(fmaxf(a[r] + all_.m, a[r] + recent_.m));
        const float sum = warp_sum(all_.s * exp2f(a[r] + all_.m - top) +
                                   recent_.s * exp2f(a[r] + recent_.m - top));
        if (lane == 0) sh_.masses[r][warp] = {top, sum};
      }
    }
    __syncthreads();
    if (warp < warps) {
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float high = kNoReference, total = 0;
        for (int w = 0; w < warps; ++w) high = fmaxf(high, sh_.masses[r][w].x);
        for (int w = 0; w < warps; ++w) {
          total += sh_.masses[r][w].y * exp2f(sh_.masses[r][w].x - high);
        }
        const float inverse = 1 / total;
        sh_.weights[r][threadIdx.x] = inverse * all_.s * exp2f(a[r] + all_.m - high);
        sh_.recent_weights[r][threadIdx.x] = inverse * recent_.s * exp2f(a[r] + recent_.m - high);
      }
    }
    __syncthreads();
  }

  __device__ void load_batch(int base) {
    batch_ = base;
#pragma unroll
    for (int u = 0; u < kStepBatch; ++u) {
      const int l = base + first_ + u * at_once_;
      if (first_ >= at_once_ || l >= d_) continue;
      const int at = l * dvp_ + 4 * column_;
      old_[u] = *reinterpret_cast<const float4*>(slot_.all.values + at);
      young_[u] = *reinterpret_cast<const float4*>(slot_.recent.values + at);
    }
  }

  // One pass over both C: the value of the new key joins that of `recent` (kAdd), and the rows are
  // summed. A thread meets the same numbers in every pass, so nothing has to be waited for.
  template <bool kAdd, bool kRead>
  __device__ void pass(float4 (&acc)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) acc[r] = {0, 0, 0, 0};
    const float4 value = reinterpret_cast<const float4*>(sh_.value)[column_];
    for (int base = 0; base < d_; base += kStepBatch * at_once_) {
      if (batch_ != base) load_batch(base);
      batch_ = -1;
#pragma unroll
      for (int u = 0; u < kStepBatch; ++u) {
        const int l = base + first_ + u * at_once_;
        if (first_ >= at_once_ || l >= d_) continue;
        const int at = l * dvp_ + 4 * column_;
        if constexpr (kAdd) {
          if (fold_) {
            old_[u] = scaled(sh_.first[l], old_[u]);
            add_scaled(old_[u], sh_.second[l], young_[u]);
            young_[u] = {0, 0, 0, 0};
            *reinterpret_cast<float4*>(slot_.all.values + at) = old_[u];
          }
          young_[u] = blend(young_[u], value, sh_.share[l]);
          *reinterpret_cast<float4*>(slot_.recent.values + at) = young_[u];
        }
        if constexpr (kRead) {
#pragma unroll
          for (int r = 0; r < kRows; ++r) {
            add_scaled(acc[r], sh_.weights[r][l], old_[u]);
            add_scaled(acc[r], sh_.recent_weights[r][l], young_[u]);
          }
        }
      }
    }
  }

  // This thread's part of softmax(q k^T / sqrt(d)) v over the running block. Averages at every
  // moment, so that no sum of large values overflows.
  __device__ void read_block(float4 (&mean)[kRows]) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    const std::int64_t keys = block_keys_;
#pragma unroll
    for (int r = 0; r < kRows; ++r) mean[r] = {0, 0, 0, 0};
    float high = -INFINITY, sum = 0;  // of row `warp`
    for (std::int64_t begin = 0; begin < keys; begin += kStepKeys) {
      const int count = static_cast<int>(min(keys - begin, std::int64_t{kStepKeys}));
      score_keys(begin, count);
      __syncthreads();
      if (warp < kRows) {
        float top = high;
        for (int j = lane; j < count; j += 32) top = fmaxf(top, sh_.scores[warp][j]);
        top = warp_max(top);
        float more = 0;
        for (int j = lane; j < count; j += 32) {
          const float p = exp2f(sh_.scores[warp][j] - top);
          sh_.scores[warp][j] = p;
          more += p;
        }
        const float before = sum * exp2f(high - top);
        sum = before + warp_sum(more);
        high = top;
        __syncwarp();
        for (int j = lane; j < count; j += 32) sh_.scores[warp][j] /= sum;
        if (lane == 0) sh_.keep[warp] = before / sum;
      }
      __syncthreads();
#pragma unroll
      for (int r = 0; r < kRows; ++r) mean[r] = scaled(sh_.keep[r], mean[r]);
      for (int j = first_; first_ < at_once_ && j < count; j += at_once_) {
        const float4 v =
            *reinterpret_cast<const float4*>(slot_.block_v + (begin + j) * dvp_ + 4 * column_);
#pragma unroll
        for (int r = 0; r < kRows; ++r) add_scaled(mean[r], sh_.scores[r][j], v);
      }
      __syncthreads();
    }
  }

  // scores[r][j] of keys [begin, begin + count) of the running block: a warp takes a key.
  __device__ void score_keys(std::int64_t begin, int count) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int j = warp; j < count; j += kStepWarps) {
      const float* const k = slot_.block_k + (begin + j) * c_.shape.dp;
      float dot[kRows] = {};
      for (int l = lane; l < d_; l += 32) {
        const float x = k[l];
#pragma unroll
        for (int r = 0; r < kRows; ++r) {
          if (r < tile_.count) dot[r] = fmaf(sh_.queries[r][l], x, dot[r]);
        }
      }
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        dot[r] = warp_sum(dot[r]);
        if (lane == 0) sh_.scores[r][j] = dot[r];
      }
    }
  }

  // Element threadIdx.x + i kStepThreads of the tile's [rows, dv] for every i: the sum over the
  // threads that share its column, in a fixed order.
  __device__ void sum_columns(const float4 (&part)[kRows], float (&sums)[kRows]) {
#pragma unroll
    for (int r = 0; r < kRows; ++r) sh_.partial[r][threadIdx.x] = part[r];
    __syncthreads();
    const int dv = static_cast<int>(c_.shape.dv);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kStepThreads;
      if (at >= tile_.count * dv) continue;
      const auto* const column = reinterpret_cast<const float*>(sh_.partial[at / dv]) + at % dv;
      sums[i] = 0;
      for (int p = 0; p < at_once_; ++p) sums[i] += column[4 * columns_ * p];
    }
    __syncthreads();
  }

  __device__ void write_rows(const float (&lln)[kRows], const float (&diag)[kRows]) const {
    const DeviceCall& call = c_.call;
    const int dv = static_cast<int>(c_.shape.dv);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int at = static_cast<int>(threadIdx.x) + i * kStepThreads;
      if (at >= tile_.count * dv) continue;
      const int r = at / dv, c = at % dv;
      float x = lln[i];
      if constexpr (kBlock) {
        x = weight_at(call.lln_weight, sequence_, head_of(r), row_of(r), c) * x +
            weight_at(call.diag_weight, sequence_, head_of(r), row_of(r), c) * diag[i];
      }
      store_number(call.o, call.dtype, row_at(call.o, sequence_, head_of(r), row_of(r)) + c, x);
    }
  }

  const DecodeCall& c_;
  StepShared<kRows>& sh_;
  unsigned index_, sequence_, head_k_, group_;
  DecodeSlot slot_;
  std::int64_t tokens_;          // of the sequence so far
  std::int64_t block_keys_ = 0;  // of them in the running block
  int d_, dvp_;
  int columns_;  // groups of 4
  int at_once_;  // rows of C that the threads cover together
  int column_, first_;
  Mass all_ = {kNoReference, 0}, recent_ = {kNoReference, 0};  // of channel threadIdx.x
  bool fold_ = false;
  int batch_ = -1;  // the row of C at which old_ and young_ begin; -1: they hold nothing
  float4 old_[kStepBatch], young_[kStepBatch];
  Tile tile_ = {};
  std::uint32_t queries_[kRows];  // of the rows of the tile, as bits
  float alpha_[kRows];
};

}  // namespace lln::cuda
