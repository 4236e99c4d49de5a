// Running sums over the pieces of a sequence, in their order, for causal LLN of 129 to 256
// channels: what the tokens of other pieces meet, and the state after the last token.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_wide_causal_tiles.cuh"

namespace lln::cuda {

// What a thread adds: four neighbouring numbers of K, then of s, over the pieces of a sequence.
struct WideRunningSum {
  std::int64_t s, head, slot;  // slot: of the sequence's first piece
  int pieces;
  std::int64_t element, values;  // element: from `values` on those of s

  __device__ WideRunningSum(const DeviceCall& call, int threads) {
    const auto dim = static_cast<std::uint32_t>(call.dim);
    const std::uint32_t all = dim * static_cast<std::uint32_t>(call.dim_v);
    const std::uint32_t blocks = ((all + dim) / 4 - 1) / static_cast<std::uint32_t>(threads) + 1;
    const auto heads = static_cast<std::uint32_t>(call.heads_k);
    const std::uint32_t pair = blockIdx.x / blocks;
    s = pair / heads;
    head = pair % heads;
    values = all;
    element = (static_cast<std::int64_t>(blockIdx.x % blocks) * threads + threadIdx.x) * 4;
    const DeviceSequence sequence = sequence_at(call.sequences, s);
    const std::int64_t left = sequence.q_tokens - sequence.key_first;
    pieces = left <= 0 ? 0 : static_cast<int>((left - 1) >> kWideCausalPieceLog2) + 1;
    slot = causal_slot<kWideCausalPieceLog2>(call, sequence, sequence.key_first);
  }
};

inline constexpr int kWideJoinThreads = 128;

// kRows: from the last piece to the second.
template <bool kRows>
__global__ void __launch_bounds__(kWideJoinThreads)
    wide_causal_join(const __grid_constant__ WideCausalCall wide) {
  constexpr int kAtOnce = 8;  // loads under way
  const DeviceCall& call = wide.causal.call;
  const Partials& sums = wide.causal.before;
  const WideRunningSum at(call, kWideJoinThreads);
  if (at.element >= at.values + call.dim) return;
  const bool of_values = at.element < at.values;
  const std::int64_t stride = of_values ? at.values : call.dim;
  const std::int64_t element = of_values ? at.element : at.element - at.values;
  const float* const from = of_values ? sums.values : sums.s;
  const auto place = [&](int step) {  // of the step-th piece after the first that is added
    const int piece = kRows ? at.pieces - 1 - step : 1 + step;
    return ((at.slot + piece) * call.heads_k + at.head) * stride + element;
  };
  float total[4] = {};
  for (int first = 0; first < at.pieces - 1; first += kAtOnce) {
    float4 own[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < at.pieces - 1) {
        own[i] = *reinterpret_cast<const float4*>(from + place(first + i));
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= at.pieces - 1) continue;
      total[0] += own[i].x;
      total[1] += own[i].y;
      total[2] += own[i].z;
      total[3] += own[i].w;
      if (of_values) {
        *reinterpret_cast<uint2*>(wide.matrices + place(first + i)) = {
            pack<Bf16>(total[0], total[1]), pack<Bf16>(total[2], total[3])};
      } else {
        *reinterpret_cast<float4*>(wide.masses + place(first + i)) = {total[0], total[1], total[2],
                                                                      total[3]};
      }
    }
  }
}

// (c, C) after the last token of every sequence: the sums of its last piece, which lie in place of
// C, and those before it.
__global__ void __launch_bounds__(kWideJoinThreads)
    wide_causal_save(const __grid_constant__ WideCausalCall wide) {
  const CausalCall& causal = wide.causal;
  const DeviceCall& call = causal.call;
  const Partials& sums = causal.before;
  const WideRunningSum at(call, kWideJoinThreads);
  if (at.element >= at.values + call.dim) return;
  const bool of_values = at.element < at.values;
  const std::int64_t element = of_values ? at.element : at.element - at.values;
  const std::int64_t channel = of_values ? element / call.dim_v : element;
  const float* const last = wide.last_masses + (at.s * call.heads_k + at.head) * call.dim;
  const auto slot = [&](int piece) { return (at.slot + piece) * call.heads_k + at.head; };
  float total[4] = {}, mass = 0;
  for (int piece = 1; piece < at.pieces; ++piece) {
    if (of_values) {
      const float4 own =
          *reinterpret_cast<const float4*>(sums.values + slot(piece) * at.values + element);
      total[0] += own.x;
      total[1] += own.y;
      total[2] += own.z;
      total[3] += own.w;
      mass += sums.s[slot(piece) * call.dim + channel];
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) total[i] += sums.s[slot(piece) * call.dim + channel + i];
    }
  }
  bool good = true;
  if (of_values) {
    float* const to = causal.saved.values_at(at.s, at.head) + channel * causal.saved.row +
                      (element - channel * call.dim_v);
    mass += last[channel];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[i] = mass == 0 ? 0 : (total[i] + to[i]) / mass;
      good = good && fabsf(to[i]) <= kLargestBf16;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float s = total[i] + last[channel + i];
      good = good && s <= kLargestBf16;
      causal.saved.c_at(at.s, at.head)[channel + i] = s == 0 ? -INFINITY : logf(s);
    }
  }
  CausalPiece piece;
  piece.s = at.s;
  piece.head_k = at.head;
  report_reach(causal, piece, good);
}

}  // namespace lln::cuda
