// Moments of q and k in one pass at the speed of memory: a block sums a piece of a head's tokens, a
// warp joins the pieces of a head in order.
//
// Every thread has a pivot, its own first number, and sums differences from it: in f32 over the few
// vectors that it has under way, then in f64. Nothing cancels that way (math/moments.h), and f64
// arithmetic stays off the path that memory waits for.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/moments_pairs.cuh"

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "cuda/device.h"
#include "cuda/device_call.h"
#include "cuda/launch.h"
#include "cuda/mma.cuh"
#include "cuda/warp.cuh"

namespace lln::cuda {
namespace {

constexpr int kUnderWay = 4;  // 16-byte vectors of a thread

// Pieces of a sequence: small enough that one long head fills the device.
constexpr Jobs kJobs{8, 9};

// q or k.
struct Side {
  Rows rows;
  std::int64_t heads;
  unsigned pieces;      // of a sequence at most
  unsigned head_parts;  // of all sequences
  bool keys;            // rows of the keys
  bool key_span;        // which keys count holds for these rows
  const std::uint8_t* mask;
  std::int64_t mask_batch, mask_token;
  Moments* parts;  // [heads, head_parts]
};

struct MomentsCall {
  Sequences sequences;
  bool packed;
  int dim;
  Side q, k;
  std::int64_t heads_k, group;
  Moments* pair_q;  // [S, heads_k]
  Moments* pair_k;
  ScaleOutputs scales;  // of each pair, where given
};

struct Span {
  std::int64_t batch, begin, end;
};

__device__ Span span_of(const Side& side, const DeviceSequence& sequence) {
  const std::int64_t begin = side.keys ? sequence.k_begin : sequence.q_begin;
  if (side.key_span) {
    return {sequence.batch, begin + sequence.key_first, begin + sequence.key_end};
  }
  return {sequence.batch, begin, begin + (side.keys ? sequence.k_tokens : sequence.q_tokens)};
}

// The rows of a piece; none where there is no such piece.
__device__ Span piece_span(const MomentsCall& call, const Side& side, unsigned part) {
  std::int64_t index;
  Span span;
  if (call.packed) {
    const JobPlace place =
        side.keys ? find_job<true>(call.sequences, part) : find_job<false>(call.sequences, part);
    if (place.s < 0) return {0, 0, 0};
    index = place.index;
    span = span_of(side, place.sequence);
  } else {
    index = part % side.pieces;
    span = span_of(side, sequence_at(call.sequences, part / side.pieces));
  }
  const std::int64_t piece = call.sequences.k_jobs.piece(span.end - span.begin);
  const std::int64_t begin = span.begin + index * piece;
  return {span.batch, begin, min(span.end, begin + piece)};
}

// kVector numbers as they lie in memory.
template <class T, int kVector>
struct alignas(kVector * sizeof(T)) Vector {
  T x[kVector];
};

__device__ inline float number(float x) { return x; }
__device__ inline float number(__half x) { return __half2float(x); }
__device__ inline float number(__nv_bfloat16 x) { return __bfloat162float(x); }

// Sums of the differences from a pivot, and of their squares.
struct PivotSums {
  double count = 0;
  float pivot = 0;
  double sum = 0, squares = 0;
};

template <class T, int kVector>
__device__ PivotSums thread_sums(const Side& side, const Span& span, std::int64_t head, int dim) {
  const int lanes = dim / kVector, at_once = kMomentThreads / lanes;
  const int column = static_cast<int>(threadIdx.x) % lanes * kVector;
  const int first = static_cast<int>(threadIdx.x) / lanes;
  const T* const rows = static_cast<const T*>(side.rows.data) + span.batch * side.rows.batch +
                        head * side.rows.head + column;
  const auto counts = [&](std::int64_t row) {
    return row < span.end && (side.mask == nullptr ||
                              side.mask[span.batch * side.mask_batch + row * side.mask_token] != 0);
  };
  PivotSums sums;
  if (first >= at_once) return sums;
  std::int64_t vectors = 0;
  for (std::int64_t row = span.begin + first; row < span.end; row += kUnderWay * at_once) {
    Vector<T, kVector> x[kUnderWay];
    bool there[kUnderWay];
#pragma unroll
    for (int u = 0; u < kUnderWay; ++u) {
      const std::int64_t at = row + u * at_once;
      there[u] = counts(at);
      if (there[u]) {
        x[u] = *reinterpret_cast<const Vector<T, kVector>*>(rows + at * side.rows.token);
      }
    }
    float run = 0, run_squares = 0;
#pragma unroll
    for (int u = 0; u < kUnderWay; ++u) {
      if (!there[u]) continue;
      if (vectors == 0) sums.pivot = number(x[u].x[0]);
      ++vectors;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float gap = number(x[u].x[i]) - sums.pivot;
        run += gap;
        run_squares = fmaf(gap, gap, run_squares);
      }
    }
    sums.sum += run;
    sums.squares += run_squares;
  }
  sums.count = static_cast<double>(vectors * kVector);
  return sums;
}

__device__ inline double warp_total(double x) {
  for (int step = 16; step > 0; step /= 2) x += __shfl_down_sync(kAllLanes, x, step);
  return x;
}

struct BlockSums {
  float pivots[kMomentWarps];
  bool any[kMomentWarps];
  double count[kMomentWarps], sum[kMomentWarps], squares[kMomentWarps];
};

// The moments of all threads' numbers, for thread 0. Sums are moved to the first pivot there is, so
// that they can be added up: no division until the last.
__device__ Moments block_moments(const PivotSums& own, BlockSums& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const unsigned seen = __ballot_sync(kAllLanes, own.count > 0);
  const float first = __shfl_sync(kAllLanes, own.pivot, seen == 0 ? 0 : __ffs(seen) - 1);
  if (lane == 0) {
    shared.pivots[warp] = first;
    shared.any[warp] = seen != 0;
  }
  __syncthreads();
  float pivot = 0;
  for (int w = kMomentWarps - 1; w >= 0; --w) {
    if (shared.any[w]) pivot = shared.pivots[w];
  }
  const double gap = static_cast<double>(own.pivot) - pivot;
  const bool counts = own.count > 0;
  const double count = warp_total(own.count);
  const double sum = warp_total(counts ? own.sum + own.count * gap : 0);
  const double squares =
      warp_total(counts ? own.squares + gap * (2 * own.sum + own.count * gap) : 0);
  if (lane == 0) {
    shared.count[warp] = count;
    shared.sum[warp] = sum;
    shared.squares[warp] = squares;
  }
  __syncthreads();
  PivotSums all;
  for (int w = 0; w < kMomentWarps && threadIdx.x == 0; ++w) {
    all.count += shared.count[w];
    all.sum += shared.sum[w];
    all.squares += shared.squares[w];
  }
  return moments_from_sums(all.count, pivot, all.sum, all.squares);
}

template <class T, int kVector>
__global__ void __launch_bounds__(kMomentThreads)
    moments_kernel(const __grid_constant__ MomentsCall call) {
  __shared__ BlockSums shared;
  wait_for_previous();
  let_next_start();
  const unsigned q_tasks = static_cast<unsigned>(call.q.heads) * call.q.head_parts;
  const bool of_q = blockIdx.x < q_tasks;
  const Side& side = of_q ? call.q : call.k;
  const unsigned task = of_q ? blockIdx.x : blockIdx.x - q_tasks;
  const Span span = piece_span(call, side, task % side.head_parts);
  if (span.begin >= span.end) return;
  const PivotSums own = thread_sums<T, kVector>(side, span, task / side.head_parts, call.dim);
  const Moments all = block_moments(own, shared);
  if (threadIdx.x == 0) side.parts[task] = all;
}

// Writes what is wanted of a (sequence, key head); by lane 0 of a warp.
__device__ void write_pair(const MomentsCall& call, const MatchingRule& rule, std::int64_t pair,
                           const Moments& q, const Moments& k) {
  call.pair_q[pair] = q;
  call.pair_k[pair] = k;
  if (call.scales.alpha.data == nullptr) return;
  write_scales(call.scales, pair / call.heads_k, pair % call.heads_k,
               scales_of(q, k, call.dim, rule));
}

// All pieces of `heads` heads of a sequence, by a warp; lane 0 gets the result.
__device__ Moments joined_heads(const MomentsCall& call, const Side& side, std::int64_t s,
                                std::int64_t head, std::int64_t heads) {
  const DeviceSequence sequence = sequence_at(call.sequences, s);
  const Span span = span_of(side, sequence);
  const std::int64_t tokens = span.end - span.begin;
  const std::int64_t pieces = tokens > 0 ? call.sequences.k_jobs.count(tokens) : 0;
  const std::int64_t first = !call.packed ? s * side.pieces
                             : side.keys  ? sequence.k_first_job
                                          : sequence.q_first_job;
  Moments own;
  for (std::int64_t h = head; h < head + heads; ++h) {
    const Moments* const parts = side.parts + h * side.head_parts + first;
    for (std::int64_t i = threadIdx.x % 32; i < pieces; i += 32) own = merged(own, parts[i]);
  }
  return warp_merged(own);
}

// The moments of every (sequence, key head).
__global__ void __launch_bounds__(kMomentThreads)
    join_kernel(const __grid_constant__ MomentsCall call,
                const __grid_constant__ MatchingRule rule) {
  wait_for_previous();
  let_next_start();
  const std::int64_t pair = static_cast<std::int64_t>(blockIdx.x) * kMomentWarps + threadIdx.x / 32;
  if (pair >= call.sequences.count * call.heads_k) return;
  const std::int64_t s = pair / call.heads_k, head = pair % call.heads_k;
  const Moments k = joined_heads(call, call.k, s, head, 1);
  Moments q;
  if (call.q.parts != nullptr) {
    q = joined_heads(call, call.q, s, head * call.group, call.group);
  }
  if (threadIdx.x % 32 == 0) write_pair(call, rule, pair, q, k);
}

std::size_t rounded(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

// How the workspace is laid out: the table of sequences, parts of q, parts of k, pairs.
struct Layout {
  explicit Layout(const Problem& p)
      : q_pieces(kJobs.most_of_one(p.tokens)),
        k_pieces(kJobs.most_of_one(p.tokens_k)),
        q_head_parts(p.packed ? kJobs.most(p.tokens, p.sequences) : p.sequences * q_pieces),
        k_head_parts(p.packed ? kJobs.most(p.tokens_k, p.sequences) : p.sequences * k_pieces),
        table(table_bytes(p)),
        q_parts(bytes_of(p.heads * q_head_parts)),
        k_parts(bytes_of(p.heads_k * k_head_parts)),
        pairs(bytes_of(p.sequences * p.heads_k)) {}
  static std::size_t bytes_of(std::int64_t moments) {
    return rounded(static_cast<std::size_t>(moments) * sizeof(Moments));
  }
  std::size_t total() const { return table + q_parts + k_parts + 2 * pairs; }

  std::int64_t q_pieces, k_pieces;  // of a sequence at most
  std::int64_t q_head_parts, k_head_parts;
  std::size_t table, q_parts, k_parts, pairs;
};

template <class T>
bool vectors_fit(const Rows& rows, std::int64_t dim) {
  constexpr std::int64_t kVector = 16 / sizeof(T);
  return reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 && dim % kVector == 0 &&
         rows.batch % kVector == 0 && rows.head % kVector == 0 && rows.token % kVector == 0;
}

template <class T>
void launch_moments(const MomentsCall& call, const MatchingRule& rule, cudaStream_t stream) {
  const bool with_q = call.q.heads > 0;
  const bool fit =
      vectors_fit<T>(call.k.rows, call.dim) && (!with_q || vectors_fit<T>(call.q.rows, call.dim));
  const std::int64_t blocks = call.q.heads * call.q.head_parts + call.k.heads * call.k.head_parts;
  launch("moments_kernel", fit ? moments_kernel<T, 16 / sizeof(T)> : moments_kernel<T, 1>,
         LaunchShape{blocks, kMomentThreads, 0, stream, true}, call);
  const std::int64_t pairs = call.sequences.count * call.heads_k;
  launch("join_kernel", join_kernel,
         LaunchShape{blocks_for(pairs, kMomentWarps), kMomentThreads, 0, stream, true}, call, rule);
}

}  // namespace

std::size_t matching_workspace(const Problem& problem) { return Layout(problem).total(); }

PairMoments sum_pairs(const MatchingCall& from, bool with_q, const ScaleOutputs& scales,
                      const MatchingRule& rule) {
  const Problem& p = from.problem;
  if (p.sequences == 0) return {};
  Call call;
  call.problem = p;
  call.stream = from.stream;
  call.in.q = from.in.q;
  call.in.k = from.in.k;
  call.in.key_lengths = from.in.key_lengths;
  call.in.key_mask = from.in.key_mask;
  call.in.cu_seqlens_q = from.in.cu_seqlens_q;
  call.in.cu_seqlens_k = from.in.cu_seqlens_k;
  const Layout layout(p);
  DeviceCall device = make_device_call(call);
  prepare_sequences(call, kJobs, kJobs, from.workspace, device);
  std::byte* memory = from.workspace + layout.table;
  const auto take = [&](std::size_t bytes) {
    std::byte* const taken = memory;
    memory += bytes;
    return reinterpret_cast<Moments*>(taken);
  };
  MomentsCall sums{};
  sums.sequences = device.sequences;
  sums.packed = p.packed;
  sums.dim = static_cast<int>(p.dim);
  sums.heads_k = p.heads_k;
  sums.group = p.heads / p.heads_k;
  const Sequences& all = device.sequences;
  sums.scales = scales;
  sums.k.rows = device.k;
  sums.k.heads = p.heads_k;
  sums.k.pieces = static_cast<unsigned>(layout.k_pieces);
  sums.k.head_parts = static_cast<unsigned>(layout.k_head_parts);
  sums.k.keys = sums.k.key_span = true;
  sums.k.mask = all.mask;
  sums.k.mask_batch = all.mask_batch;
  sums.k.mask_token = all.mask_token;
  sums.q = sums.k;
  sums.q.rows = device.q;
  sums.q.heads = with_q ? p.heads : 0;
  sums.q.pieces = static_cast<unsigned>(layout.q_pieces);
  sums.q.head_parts = static_cast<unsigned>(layout.q_head_parts);
  sums.q.keys = false;
  if (!from.self) {
    const MaskView& mask = from.in.query_mask;
    sums.q.key_span = false;
    sums.q.mask = mask.given() ? mask.data : nullptr;
    sums.q.mask_batch = mask.stride[0];
    sums.q.mask_token = mask.stride[1];
  }
  sums.q.parts = take(layout.q_parts);
  if (!with_q) sums.q.parts = nullptr;
  sums.k.parts = take(layout.k_parts);
  sums.pair_q = take(layout.pairs);
  sums.pair_k = take(layout.pairs);
  const auto stream = static_cast<cudaStream_t>(from.stream);
  switch (p.dtype) {
    case DType::f16:
      launch_moments<__half>(sums, rule, stream);
      break;
    case DType::bf16:
      launch_moments<__nv_bfloat16>(sums, rule, stream);
      break;
    default:
      launch_moments<float>(sums, rule, stream);
  }
  return {with_q ? sums.pair_q : nullptr, sums.pair_k};
}

}  // namespace lln::cuda
