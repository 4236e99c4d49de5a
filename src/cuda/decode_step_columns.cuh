// The step of decoding as models take it: one token, and one row that reads it, of heads that share
// no keys. A slot is a block, of which each warp takes 16 columns of both C and makes the weights
// of all channels for itself, a few to a lane: warps wait for each other once, before (m, s), which
// all of them read, change. decode_step.cuh has the arithmetic, and all other forms.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/decode_step.cuh"
#include "cuda/instructions.cuh"

namespace lln::cuda {

inline constexpr int kWarpColumns = 16;  // four lanes have them as float4
inline constexpr int kRowsAtOnce = 8;    // of C, by the 32 lanes
static_assert(kStatePad % kWarpColumns == 0);
inline constexpr int kMostColumnWarps = 16;  // of a block: 256 columns
// With 128 registers a thread, which the kernels for more than 32 channels take.
inline constexpr int kResidentWarps = 16;  // of a multiprocessor

// kEach: channels of a lane, lane + 32 e; 32 kEach >= d.
template <int kEach>
class StepColumns {
  // Rows of C that a lane has under way at once, of each set: with up to 64 channels all of them,
  // with more than 128 what registers are left for.
  static constexpr int kRowsEach = kEach == 1 || kEach == 8 ? 4 : 8;
  static constexpr int kBatches = 32 * kEach / (kRowsAtOnce * kRowsEach);

 public:
  __device__ StepColumns(const DecodeCall& c, unsigned slot)
      : c_(c),
        index_(slot),
        sequence_(slot / static_cast<unsigned>(c.call.heads_k)),
        head_(slot % static_cast<unsigned>(c.call.heads_k)),
        lane_(static_cast<int>(threadIdx.x) % 32),
        column_(static_cast<int>(threadIdx.x) / 32 * kWarpColumns + lane_ % 4 * 4),
        slot_(c.shape.slot(c.state, slot)),
        tokens_(c.tokens[slot]) {
    // All that the first batch needs but the scales is asked for before anything is computed.
    load_batch(0);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (!is_channel(e)) continue;
      const int l = channel(e);
      all_[e] = {slot_.all.m[l], slot_.all.s[l]};
      recent_[e] = {slot_.recent.m[l], slot_.recent.s[l]};
      key_[e] = load_bits(c.call.k, c.call.dtype, row_at(c.call.k, sequence_, head_, 0) + l);
      query_[e] = load_bits(c.call.q, c.call.dtype, row_at(c.call.q, sequence_, head_, 0) + l);
    }
    const std::int64_t v = row_at(c.call.v, sequence_, head_, 0) + column_;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (column_ + i < c.shape.dv) value_[i] = load_bits(c.call.v, c.call.dtype, v + i);
    }
  }

  __device__ void run() {
    const bool fold = tokens_ % kRecentTokens == 0;
    add_mass(fold);
    make_weights();
    write_row(fold ? pass<true>() : pass<false>());
    __syncthreads();  // all warps have read (m, s) and the count
    if (threadIdx.x < 32) store_mass();
  }

 private:
  struct Mass {
    float m = kNoReference, s = 0;
  };

  __device__ int channel(int e) const { return lane_ + 32 * e; }
  __device__ bool is_channel(int e) const { return channel(e) < c_.shape.d; }
  // Row of C that this lane takes `u`-th in a batch.
  __device__ int row(int batch, int u) const {
    return kRowsAtOnce * (kRowsEach * batch + u) + lane_ / 4;
  }
  // What the lane that has channel row(batch, u) keeps of it.
  __device__ float of_row(const float (&x)[kEach], int batch, int u) const {
    const int first = kRowsAtOnce * (kRowsEach * batch + u);
    return __shfl_sync(kAllLanes, x[first / 32], first % 32 + lane_ / 4);
  }

  __device__ void load_batch(int batch) {
#pragma unroll
    for (int u = 0; u < kRowsEach; ++u) {
      const int l = row(batch, u);
      if (l >= c_.shape.d) continue;
      const std::int64_t at = l * c_.shape.dvp + column_;
      old_[u] = *reinterpret_cast<const float4*>(slot_.all.values + at);
      young_[u] = *reinterpret_cast<const float4*>(slot_.recent.values + at);
    }
  }

  __device__ void add_mass(bool fold) {
    const float beta = scale_at(c_.call.beta, sequence_, head_);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (!is_channel(e)) continue;
      if (fold) {
        const JoinedMass joined =
            join_mass<float>(all_[e].m, all_[e].s, recent_[e].m, recent_[e].s);
        all_[e] = {joined.m, joined.s};
        recent_[e] = {};
        first_[e] = joined.first;
        second_[e] = joined.second;
      }
      share_[e] = add_key(recent_[e].m, recent_[e].s,
                          exponent(c_.call, beta, bits_number(key_[e], c_.call.dtype)));
    }
  }

  __device__ void make_weights() {
    const float alpha = scale_at(c_.call.alpha, sequence_, head_);
    float a[kEach], top = kNoReference;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      a[e] = is_channel(e) ? exponent(c_.call, alpha, bits_number(query_[e], c_.call.dtype)) : 0;
      top = fmaxf(top, fmaxf(a[e] + all_[e].m, a[e] + recent_[e].m));
    }
    top = warp_max(top);
    float sum = 0;
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      old_weight_[e] = all_[e].s * exp2f(a[e] + all_[e].m - top);
      young_weight_[e] = recent_[e].s * exp2f(a[e] + recent_[e].m - top);
      sum += old_weight_[e] + young_weight_[e];
    }
    const float inverse = 1 / warp_sum(sum);
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      old_weight_[e] *= inverse;
      young_weight_[e] *= inverse;
    }
  }

  // The value joins C of `recent`, behind which the row is summed over channels: this lane's part.
  template <bool kFold>
  __device__ float4 pass() {
    float4 sum = {0, 0, 0, 0};
    float v[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) v[i] = bits_number(value_[i], c_.call.dtype);
    const float4 value = {v[0], v[1], v[2], v[3]};
#pragma unroll
    for (int batch = 0; batch < kBatches; ++batch) {
      if (batch > 0) load_batch(batch);
#pragma unroll
      for (int u = 0; u < kRowsEach; ++u) {
        const int l = row(batch, u);
        const float share = of_row(share_, batch, u);
        const float old_weight = of_row(old_weight_, batch, u);
        const float young_weight = of_row(young_weight_, batch, u);
        const float first = kFold ? of_row(first_, batch, u) : 0;
        const float second = kFold ? of_row(second_, batch, u) : 0;
        if (l >= c_.shape.d) continue;
        const std::int64_t at = l * c_.shape.dvp + column_;
        if constexpr (kFold) {
          old_[u] = scaled(first, old_[u]);
          add_scaled(old_[u], second, young_[u]);
          young_[u] = {0, 0, 0, 0};
          *reinterpret_cast<float4*>(slot_.all.values + at) = old_[u];
        }
        young_[u] = blend(young_[u], value, share);
        *reinterpret_cast<float4*>(slot_.recent.values + at) = young_[u];
        add_scaled(sum, old_weight, old_[u]);
        add_scaled(sum, young_weight, young_[u]);
      }
    }
    return sum;
  }

  __device__ void write_row(const float4& part) const {
    float x[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
      for (int step = 16; step >= 4; step /= 2) x[i] += __shfl_xor_sync(kAllLanes, x[i], step);
    }
    if (lane_ >= 4) return;
    const std::int64_t o = row_at(c_.call.o, sequence_, head_, 0) + column_;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (column_ + i < c_.shape.dv) store_number(c_.call.o, c_.call.dtype, o + i, x[i]);
    }
  }

  __device__ void store_mass() {
#pragma unroll
    for (int e = 0; e < kEach; ++e) {
      if (!is_channel(e)) continue;
      const int l = channel(e);
      slot_.all.m[l] = all_[e].m;
      slot_.all.s[l] = all_[e].s;
      slot_.recent.m[l] = recent_[e].m;
      slot_.recent.s[l] = recent_[e].s;
    }
    if (lane_ == 0) c_.tokens[index_] = tokens_ + 1;
  }

  const DecodeCall& c_;
  unsigned index_, sequence_, head_;
  int lane_, column_;
  DecodeSlot slot_;
  std::int64_t tokens_;
  Mass all_[kEach], recent_[kEach];
  std::uint32_t key_[kEach] = {}, query_[kEach] = {}, value_[4] = {};
  float share_[kEach] = {}, first_[kEach] = {}, second_[kEach] = {};
  float old_weight_[kEach], young_weight_[kEach];
  float4 old_[kRowsEach], young_[kRowsEach];
};

template <int kEach>
__global__ void __launch_bounds__(32 * kMostColumnWarps)
    decode_step_columns(const __grid_constant__ DecodeCall c, unsigned resident) {
  wait_for_previous();
  let_next_start();
  const auto heads_k = static_cast<unsigned>(c.call.heads_k);
  const unsigned sequence = blockIdx.x / heads_k;
  if (added_tokens(c, sequence) == 0) {
    zero_rows(c, sequence, blockIdx.x % heads_k, 0, 1);
    return;
  }
  StepColumns<kEach> step(c, blockIdx.x);
  prefetch_later_slots(c, resident);
  step.run();
}

}  // namespace lln::cuda
