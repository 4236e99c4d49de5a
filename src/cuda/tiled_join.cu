// Joins the sums of pieces: of keys by their masses, of rows by addition, in an order that depends
// on the number of pieces alone.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/device.h"
#include "cuda/tiled_keys.cuh"
#include "cuda/tiled_launch.h"

namespace lln::cuda {
namespace {

constexpr int kJoinThreads = 256;
// Pieces are cut into so many runs, summed by different threads and then in order: hundreds of
// pieces of one head would otherwise be read one after another.
constexpr int kRuns = 4;

// A thread sums one run of pieces for four columns of one channel.
struct JoinPlace {
  std::int64_t s, head, channel;
  int column, run;
  bool inside;
};

__device__ JoinPlace join_place(const DeviceCall& call) {
  const auto chunks = static_cast<std::uint32_t>(call.dim_v) / 4;
  const std::uint32_t channels = kJoinThreads / (chunks * kRuns);  // of a block
  const auto dim = static_cast<std::uint32_t>(call.dim);
  const auto heads = static_cast<std::uint32_t>(call.heads_k);
  // A block stays in one head.
  const std::uint32_t blocks = (dim + channels - 1) / channels, head = blockIdx.x / blocks;
  JoinPlace place;
  place.channel = blockIdx.x % blocks * channels + threadIdx.x / (chunks * kRuns);
  place.head = head % heads;
  place.s = head / heads;
  place.column = static_cast<int>(threadIdx.x % chunks * 4);
  place.run = static_cast<int>(threadIdx.x / chunks % kRuns);
  place.inside = threadIdx.x < channels * chunks * kRuns && place.channel < dim;
  return place;
}

__device__ void add(float4& sum, float factor, const float4& x) {
  sum.x = fmaf(factor, x.x, sum.x);
  sum.y = fmaf(factor, x.y, sum.y);
  sum.z = fmaf(factor, x.z, sum.z);
  sum.w = fmaf(factor, x.w, sum.w);
}

// Sums of all runs, in the threads of run 0.
struct RunSums {
  float4 values[kJoinThreads];
  float mass[kJoinThreads];
};

__device__ void join_runs(RunSums& shared, const JoinPlace& place, int chunks, float4& values,
                          float& mass) {
  shared.values[threadIdx.x] = values;
  shared.mass[threadIdx.x] = mass;
  __syncthreads();
  if (!place.inside || place.run != 0) return;
  for (int run = 1; run < kRuns; ++run) {
    const int other = static_cast<int>(threadIdx.x) + run * chunks;
    add(values, 1, shared.values[other]);
    mass += shared.mass[other];
  }
}

// (c, C) of every sequence and key head from the partial sums of its keys.
__global__ void __launch_bounds__(kJoinThreads) join_keys(const __grid_constant__ TiledCall tiled) {
  __shared__ RunSums shared;
  const DeviceCall& call = tiled.call;
  const JoinPlace place = join_place(call);
  float top = kNoExponent, mass = 0;
  float4 values = {0, 0, 0, 0};
  if (place.inside) {
    const DeviceSequence seq = sequence_at(call.sequences, place.s);
    const KeyPieces own = key_pieces(tiled, place.s, seq);
    const std::int64_t pieces = own.count;
    const std::int64_t first = (own.first * call.heads_k + place.head) * call.dim;
    const std::int64_t step = call.heads_k * call.dim;
    const float* const m = tiled.keys.m + first + place.channel;
    const float* const s = tiled.keys.s + first + place.channel;
    const float* const from =
        tiled.keys.values + (first + place.channel) * call.dim_v + place.column;
#pragma unroll 8
    for (std::int64_t i = 0; i < pieces; ++i) top = fmaxf(top, m[i * step]);
    const std::int64_t end = pieces * (place.run + 1) / kRuns;
#pragma unroll 4
    for (std::int64_t i = pieces * place.run / kRuns; i < end; ++i) {
      const float part = s[i * step] == 0 ? 0 : s[i * step] * exp2f(m[i * step] - top);
      mass += part;
      add(values, part, *reinterpret_cast<const float4*>(from + i * step * call.dim_v));
    }
  }
  join_runs(shared, place, static_cast<int>(call.dim_v) / 4, values, mass);
  if (!place.inside || place.run != 0) return;
  const float inverse = mass == 0 ? 0 : 1 / mass;
  if (place.column == 0) {
    tiled.state.c_at(place.s, place.head)[place.channel] =
        mass == 0 ? -INFINITY : (top + log2f(mass)) * kLn2;
  }
  float* const to = tiled.state.values_at(place.s, place.head) +
                    place.channel * tiled.state.row + place.column;
  *reinterpret_cast<float4*>(to) = {values.x * inverse, values.y * inverse, values.z * inverse,
                                    values.w * inverse};
}

// dC and t of every sequence and key head: sums over the pieces of all query heads of the group.
__global__ void __launch_bounds__(kJoinThreads) join_rows(const __grid_constant__ TiledCall tiled) {
  __shared__ RunSums shared;
  const DeviceCall& call = tiled.call;
  const JoinPlace place = join_place(call);
  float t = 0;
  float4 values = {0, 0, 0, 0};
  if (place.inside) {
    const DeviceSequence seq = sequence_at(call.sequences, place.s);
    const auto group = static_cast<std::uint32_t>(call.heads) / static_cast<std::uint32_t>(call.heads_k);
    const auto pieces = static_cast<std::uint32_t>(call.sequences.q_jobs.count(seq.q_tokens)) * group;
    const std::uint32_t end = pieces * (place.run + 1) / kRuns;
#pragma unroll 4
    for (std::uint32_t i = pieces * place.run / kRuns; i < end; ++i) {
      const std::int64_t slot =
          (seq.q_first_job + i / group) * call.heads + place.head * group + i % group;
      const std::int64_t at = slot * call.dim + place.channel;
      t += tiled.rows.s[at];
      add(values, 1,
          *reinterpret_cast<const float4*>(tiled.rows.values + at * call.dim_v + place.column));
    }
  }
  join_runs(shared, place, static_cast<int>(call.dim_v) / 4, values, t);
  if (!place.inside || place.run != 0) return;
  if (place.column == 0) tiled.grads.c_at(place.s, place.head)[place.channel] = t;
  float* const to = tiled.grads.values_at(place.s, place.head) +
                    place.channel * tiled.grads.row + place.column;
  *reinterpret_cast<float4*>(to) = values;
}

unsigned join_blocks(const DeviceCall& call) {
  const std::int64_t channels = kJoinThreads / (call.dim_v / 4 * kRuns);
  return static_cast<unsigned>(call.sequences.count * call.heads_k *
                               ((call.dim + channels - 1) / channels));
}

}  // namespace

void launch_join_keys(const TiledCall& tiled, cudaStream_t stream) {
  join_keys<<<join_blocks(tiled.call), kJoinThreads, 0, stream>>>(tiled);
  check_launch("join_keys");
}

void launch_join_rows(const TiledCall& tiled, cudaStream_t stream) {
  join_rows<<<join_blocks(tiled.call), kJoinThreads, 0, stream>>>(tiled);
  check_launch("join_rows");
}

}  // namespace lln::cuda
