// Joins the sums of pieces: of keys by their masses, of rows by addition, in an order that depends
// on the number of pieces alone.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/launch.h"
#include "cuda/tiled_keys.cuh"
#include "cuda/tiled_launch.h"

namespace lln::cuda {
namespace {

constexpr int kJoinThreads = 256;
// Many pieces are summed in this many runs, which are then added in order; few in one.
constexpr int kRuns = 4;
constexpr int kManyPieces = 32;

// Sums of pieces for four columns of one channel, with their reference exponent.
struct Joined {
  float m = kNoExponent, mass = 0;
  float4 values = {0, 0, 0, 0};
};

__device__ void scale(Joined& sums, float factor) {
  sums.mass *= factor;
  sums.values.x *= factor;
  sums.values.y *= factor;
  sums.values.z *= factor;
  sums.values.w *= factor;
}

// `values` are averages of the mass where kAverages, sums otherwise. References are equal nearly
// always (0), and then nothing is rescaled.
template <bool kAverages>
__device__ void add(Joined& sums, float m, float mass, const float4& values) {
  float factor = 1;
  if (m != sums.m) {
    const float top = fmaxf(m, sums.m);
    scale(sums, exp2f(sums.m - top));
    factor = exp2f(m - top);
    sums.m = top;
  }
  const float weight = kAverages ? mass * factor : factor;
  sums.mass = fmaf(mass, factor, sums.mass);
  sums.values.x = fmaf(weight, values.x, sums.values.x);
  sums.values.y = fmaf(weight, values.y, sums.values.y);
  sums.values.z = fmaf(weight, values.z, sums.values.z);
  sums.values.w = fmaf(weight, values.w, sums.values.w);
}

// A thread takes four columns of one channel of one sequence and key head, and all pieces or, where
// kSplit, one run of them.
struct JoinPlace {
  std::int64_t s, head, channel;
  int column, run;
  bool inside;
};

template <bool kSplit>
__device__ JoinPlace join_place(const DeviceCall& call) {
  constexpr std::uint32_t kOwnRuns = kSplit ? kRuns : 1;
  const auto chunks = static_cast<std::uint32_t>(call.dim_v) / 4;
  const std::uint32_t channels = kJoinThreads / (chunks * kOwnRuns);  // of a block
  const auto dim = static_cast<std::uint32_t>(call.dim);
  const auto heads = static_cast<std::uint32_t>(call.heads_k);
  const std::uint32_t blocks = (dim + channels - 1) / channels;  // of a head
  const std::uint32_t head = blockIdx.x / blocks;
  JoinPlace place;
  place.channel = blockIdx.x % blocks * channels + threadIdx.x / (chunks * kOwnRuns);
  place.head = head % heads;
  place.s = head / heads;
  place.column = static_cast<int>(threadIdx.x % chunks * 4);
  place.run = static_cast<int>(threadIdx.x / chunks % kOwnRuns);
  place.inside = threadIdx.x < channels * chunks * kOwnRuns && place.channel < dim;
  return place;
}

// Sums over pieces 0 .. pieces - 1, of which piece(i) adds the i-th, in the threads of run 0.
template <bool kSplit, class AddPiece>
__device__ Joined join_pieces(const JoinPlace& place, int pieces, int chunks,
                              AddPiece&& add_piece) {
  __shared__ Joined shared[kSplit ? kJoinThreads : 1];
  const auto sum_run = [&](int run) {
    Joined sums;
    const int runs = pieces > kManyPieces ? kRuns : 1;
    const int end = run < runs ? pieces * (run + 1) / runs : 0;
#pragma unroll 4
    for (int i = run < runs ? pieces * run / runs : 0; i < end; ++i) add_piece(sums, i);
    return sums;
  };
  Joined total = place.inside ? sum_run(kSplit ? place.run : 0) : Joined();
  if constexpr (kSplit) {
    shared[threadIdx.x] = total;
    __syncthreads();
  }
  if (!place.inside || place.run != 0) return total;
  for (int run = 1; run < (pieces > kManyPieces ? kRuns : 1); ++run) {
    const Joined other = kSplit ? shared[threadIdx.x + run * chunks] : sum_run(run);
    add<false>(total, other.m, other.mass, other.values);
  }
  return total;
}

// (c, C) of every sequence and key head from the partial sums of its keys.
template <bool kSplit>
__global__ void __launch_bounds__(kJoinThreads) join_keys(const __grid_constant__ TiledCall tiled) {
  const DeviceCall& call = tiled.call;
  wait_for_previous();
  let_next_start();
  const JoinPlace place = join_place<kSplit>(call);
  const KeyPieces own = key_pieces(tiled, place.s, sequence_at(call.sequences, place.s));
  const std::int64_t first = (own.first * call.heads_k + place.head) * call.dim + place.channel;
  const std::int64_t step = call.heads_k * call.dim;
  const float* const m = tiled.keys.m + first;
  const float* const s = tiled.keys.s + first;
  const float* const values = tiled.keys.values + first * call.dim_v + place.column;
  const std::int64_t values_step = step * call.dim_v;
  const Joined sums =
      join_pieces<kSplit>(place, static_cast<int>(own.count), static_cast<int>(call.dim_v) / 4,
                          [&](Joined& total, int i) {
                            add<true>(total, m[i * step], s[i * step],
                                      *reinterpret_cast<const float4*>(values + i * values_step));
                          });
  if (!place.inside || place.run != 0) return;
  // The average of the only piece is that of the sequence, to the last bit.
  const float inverse = sums.mass == 0 || own.count == 1 ? 0 : 1 / sums.mass;
  if (place.column == 0) {
    tiled.state.c_at(place.s, place.head)[place.channel] =
        sums.mass == 0 ? -INFINITY : (sums.m + log2f(sums.mass)) * kLn2;
  }
  float* const to =
      tiled.state.values_at(place.s, place.head) + place.channel * tiled.state.row + place.column;
  *reinterpret_cast<float4*>(to) = own.count == 1
                                       ? *reinterpret_cast<const float4*>(values)
                                       : float4{sums.values.x * inverse, sums.values.y * inverse,
                                                sums.values.z * inverse, sums.values.w * inverse};
}

// dC and t of every sequence and key head: sums over the pieces of all query heads of the group.
template <bool kSplit>
__global__ void __launch_bounds__(kJoinThreads) join_rows(const __grid_constant__ TiledCall tiled) {
  const DeviceCall& call = tiled.call;
  wait_for_previous();
  let_next_start();
  const JoinPlace place = join_place<kSplit>(call);
  const DeviceSequence seq = sequence_at(call.sequences, place.s);
  const auto group =
      static_cast<std::uint32_t>(call.heads) / static_cast<std::uint32_t>(call.heads_k);
  const auto pieces = static_cast<int>(call.sequences.q_jobs.count(seq.q_tokens) * group);
  const Joined sums = join_pieces<kSplit>(
      place, pieces, static_cast<int>(call.dim_v) / 4, [&](Joined& total, int i) {
        const std::uint32_t piece = static_cast<std::uint32_t>(i) / group;
        const std::int64_t slot = (seq.q_first_job + piece) * call.heads + place.head * group +
                                  (static_cast<std::uint32_t>(i) - piece * group);
        const std::int64_t at = slot * call.dim + place.channel;
        add<false>(
            total, 0, tiled.rows.s[at],
            *reinterpret_cast<const float4*>(tiled.rows.values + at * call.dim_v + place.column));
      });
  if (!place.inside || place.run != 0) return;
  if (place.column == 0) tiled.grads.c_at(place.s, place.head)[place.channel] = sums.mass;
  float* const to =
      tiled.grads.values_at(place.s, place.head) + place.channel * tiled.grads.row + place.column;
  *reinterpret_cast<float4*>(to) = sums.values;
}

LaunchShape join_shape(const DeviceCall& call, bool split, cudaStream_t stream) {
  const std::int64_t channels = kJoinThreads / (call.dim_v / 4 * (split ? kRuns : 1));
  return {call.sequences.count * call.heads_k * ((call.dim + channels - 1) / channels),
          kJoinThreads, 0, stream, true};
}

}  // namespace

void launch_join_keys(const TiledCall& tiled, cudaStream_t stream) {
  const bool split = tiled.key_pieces > kManyPieces;
  launch("join_keys", split ? join_keys<true> : join_keys<false>,
         join_shape(tiled.call, split, stream), tiled);
}

bool launch_join_rows(const TiledCall& tiled, cudaStream_t stream) {
  if (tiled.rows.values == tiled.grads.values) return false;
  const DeviceCall& call = tiled.call;
  const Sequences& all = call.sequences;
  const bool split = all.q_jobs.count(all.tokens) * (call.heads / call.heads_k) > kManyPieces;
  launch("join_rows", split ? join_rows<true> : join_rows<false>, join_shape(call, split, stream),
         tiled);
  return true;
}

}  // namespace lln::cuda
