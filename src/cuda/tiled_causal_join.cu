// Running sums over the pieces of each sequence: of the keys before a piece, and of the rows behind
// it with all query heads of a group. In the order of the pieces, whatever the batch.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch.h"
#include "cuda/tiled_causal_call.h"

namespace lln::cuda {
namespace {

constexpr int kJoinThreads = 128;
constexpr int kAtOnce = 8;  // loads under way

__device__ void add(float4& sum, const float4& x) {
  sum.x += x.x;
  sum.y += x.y;
  sum.z += x.z;
  sum.w += x.w;
}

// A thread adds four neighbouring numbers of [s, K], or [T, G], over the pieces of a sequence.
struct RunningSum {
  float* at;            // in slot 0
  std::int64_t stride;  // of heads
  std::int64_t slot;    // of the sequence's first piece
  int pieces;
};

__device__ RunningSum find_sum(const CausalCall& causal, const Partials& sums, std::int64_t heads) {
  const DeviceCall& call = causal.call;
  const auto dim = static_cast<std::uint32_t>(call.dim);
  const std::uint32_t values = dim * static_cast<std::uint32_t>(call.dim_v);
  const std::uint32_t blocks = ((values + dim) / 4 - 1) / kJoinThreads + 1;
  const auto heads_k = static_cast<std::uint32_t>(call.heads_k);
  const std::uint32_t pair = blockIdx.x / blocks;
  const DeviceSequence sequence = sequence_at(call.sequences, pair / heads_k);
  const std::uint32_t element = (blockIdx.x % blocks * kJoinThreads + threadIdx.x) * 4;
  const std::int64_t head = pair % heads_k * (heads / heads_k);
  RunningSum sum;
  const std::int64_t left = sequence.q_tokens - sequence.key_first;
  sum.pieces = element < values + dim ? static_cast<int>((left - 1) >> kCausalPieceLog2) + 1 : 0;
  sum.slot = causal_slot(call, sequence, sequence.key_first);
  sum.stride = element < values ? values : dim;
  sum.at =
      (element < values ? sums.values + element : sums.s + element - values) + head * sum.stride;
  return sum;
}

__global__ void __launch_bounds__(kJoinThreads)
    join_before(const __grid_constant__ CausalCall causal) {
  const std::int64_t heads = causal.call.heads_k;
  const RunningSum sum = find_sum(causal, causal.before, heads);
  float4 total = {0, 0, 0, 0};
  for (int piece = 1; piece < sum.pieces; piece += kAtOnce) {
    float4 own[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (piece + i >= sum.pieces) continue;
      own[i] =
          *reinterpret_cast<const float4*>(sum.at + (sum.slot + piece + i) * heads * sum.stride);
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (piece + i >= sum.pieces) continue;
      add(total, own[i]);
      *reinterpret_cast<float4*>(sum.at + (sum.slot + piece + i) * heads * sum.stride) = total;
    }
  }
}

__global__ void __launch_bounds__(kJoinThreads)
    join_behind(const __grid_constant__ CausalCall causal) {
  const std::int64_t heads = causal.call.heads;
  const int group = static_cast<int>(static_cast<std::uint32_t>(heads) /
                                     static_cast<std::uint32_t>(causal.call.heads_k));
  const RunningSum sum = find_sum(causal, causal.behind, heads);
  float4 total = {0, 0, 0, 0};
  for (int piece = sum.pieces - 1; piece > 0; piece -= kAtOnce) {
    float4 own[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) own[i] = {0, 0, 0, 0};
    for (int head = 0; head < group; ++head) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (piece - i <= 0) continue;
        add(own[i], *reinterpret_cast<const float4*>(
                        sum.at + ((sum.slot + piece - i) * heads + head) * sum.stride));
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (piece - i <= 0) continue;
      add(total, own[i]);
      *reinterpret_cast<float4*>(sum.at + (sum.slot + piece - i) * heads * sum.stride) = total;
    }
  }
}

void launch_join(const char* name, void (*kernel)(CausalCall), const CausalCall& causal,
                 const CausalPlan& plan) {
  const DeviceCall& call = causal.call;
  const std::int64_t blocks = ((call.dim * call.dim_v + call.dim) / 4 - 1) / kJoinThreads + 1;
  const std::int64_t pairs = call.sequences.count * call.heads_k;
  launch(name, kernel, LaunchShape{pairs * blocks, kJoinThreads, 0, plan.stream}, causal);
}

}  // namespace

void launch_join_before(const CausalCall& causal, const CausalPlan& plan) {
  launch_join("join_before", join_before, causal, plan);
}
void launch_join_behind(const CausalCall& causal, const CausalPlan& plan) {
  launch_join("join_behind", join_behind, causal, plan);
}

}  // namespace lln::cuda
