// The two parts by the kernels of their own, and their products with g.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/weight_gradients.h"

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/part_calls.h"
#include "cuda/row_pieces.cuh"
#include "cuda/tiled_plan.h"
#include "cuda/warp.cuh"

namespace lln::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kRunRows = 256;     // of a block
constexpr int kMostChannels = 8;  // of a lane: 256 in all

// The gradient of one weight, [1 or batch, 1 or heads, 1 or tokens, 1 or dim_v].
struct WeightGradient {
  float* data;
  std::int64_t batch, head, token, channel;  // strides
  std::int64_t heads, channels;              // 1: shared by all
  bool per_token;
};

// What one part adds to it.
struct PartDots {
  Rows g, part;
  std::int64_t batches, heads, tokens, runs;
  int dim_v;
  float* sums;  // [batches, heads, runs, to.channels], where the weight is of all tokens
  WeightGradient to;
  float sign;
  bool add;  // to what the other part has written

  __device__ void write(std::int64_t at, float sum) const {
    to.data[at] = add ? fmaf(sign, sum, to.data[at]) : sign * sum;
  }
};

// Lane l has every kEach neighbouring channels in turn: two of a word where rows are whole pieces.
template <class T, bool kWhole>
struct LaneChannels {
  static constexpr int kEach = kWhole && sizeof(T) == 2 ? 2 : 1;
  static constexpr int kTurns = kMostChannels / kEach;
  float x[kTurns][kEach] = {};

  static __device__ int channel(int turn, int lane) { return (turn * kWarp + lane) * kEach; }

  __device__ void load(const T* row, int lane, int channels) {
#pragma unroll
    for (int i = 0; i < kTurns; ++i) {
      const int c = channel(i, lane);
      if (c >= channels) continue;
      if constexpr (kEach == 2) {
        const float2 pair = unpack<T>(*reinterpret_cast<const std::uint32_t*>(row + c));
        x[i][0] = pair.x;
        x[i][1] = pair.y;
      } else {
        x[i][0] = load_number(row + c);
      }
    }
  }
};

// A warp takes a row; a block the rows of one run.
template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads) dot_parts(const __grid_constant__ PartDots d) {
  using Channels = LaneChannels<T, kWhole>;
  __shared__ float shared[kWarps][kMostChannels * kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t run = blockIdx.x % d.runs, head = blockIdx.x / d.runs;
  const std::int64_t h = head % d.heads, b = head / d.heads;
  const std::int64_t end = min((run + 1) * kRunRows, d.tokens);
  Channels sums;
  for (std::int64_t n = run * kRunRows + warp; n < end; n += kWarps) {
    Channels x, y;
    x.load(row_at<const T>(d.part, b, h, n, 0), lane, d.dim_v);
    bool zero = true;
#pragma unroll
    for (int i = 0; i < Channels::kTurns; ++i) {
#pragma unroll
      for (int e = 0; e < Channels::kEach; ++e) zero = zero && x.x[i][e] == 0;
    }
    // A row that sees no key is 0, whatever its gradient holds.
    float row = 0;
    if (__any_sync(kAllLanes, !zero)) {
      y.load(row_at<const T>(d.g, b, h, n, 0), lane, d.dim_v);
#pragma unroll
      for (int i = 0; i < Channels::kTurns; ++i) {
#pragma unroll
        for (int e = 0; e < Channels::kEach; ++e) {
          const float both = y.x[i][e] * x.x[i][e];
          row += both;
          sums.x[i][e] += both;
        }
      }
    }
    if (!d.to.per_token) continue;
    row = warp_sum(row);
    if (lane == 0) d.write(b * d.to.batch + h * d.to.head + n * d.to.token, row);
  }
  if (d.to.per_token) return;
#pragma unroll
  for (int i = 0; i < Channels::kTurns; ++i) {
#pragma unroll
    for (int e = 0; e < Channels::kEach; ++e) {
      shared[warp][Channels::channel(i, lane) + e] = sums.x[i][e];
    }
  }
  __syncthreads();
  float total = 0;  // of the channel of this thread
  for (int w = 0; w < kWarps; ++w) total += shared[w][threadIdx.x];
  float* const to = d.sums + std::int64_t{blockIdx.x} * d.to.channels;
  if (d.to.channels > 1) {
    if (static_cast<int>(threadIdx.x) < d.dim_v) to[threadIdx.x] = total;
    return;
  }
  const float channels = warp_sum(total);
  __syncthreads();  // all have read what is overwritten
  if (lane == 0) shared[0][warp] = channels;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += shared[0][w];
  *to = sum;
}
static_assert(kThreads == kMostChannels * kWarp, "a thread for every channel");

using DotKernel = void (*)(PartDots);

DotKernel dot_kernel(DType dtype, bool whole) {
  switch (dtype) {
    case DType::bf16:
      return whole ? dot_parts<Bf16, true> : dot_parts<Bf16, false>;
    case DType::f16:
      return whole ? dot_parts<F16, true> : dot_parts<F16, false>;
    default:
      return dot_parts<float, false>;  // a lane reads 4 bytes either way
  }
}

// One element of the gradient to a block: the sums of all runs that share the weight, in the order
// of their places. There are fewer than blocks in a grid, so that 32 bits count them.
__global__ void __launch_bounds__(kThreads) add_runs(const __grid_constant__ PartDots d) {
  __shared__ double shared[kThreads];
  const auto channels = static_cast<std::uint32_t>(d.to.channels);
  const auto runs = static_cast<std::uint32_t>(d.runs);
  const auto heads = static_cast<std::uint32_t>(d.to.heads == 1 ? d.heads : 1);
  const std::uint32_t c = blockIdx.x % channels, h = blockIdx.x / channels;
  const auto count = static_cast<std::uint32_t>(d.batches) * heads * runs;
  double sum = 0;
  for (std::uint32_t i = threadIdx.x; i < count; i += kThreads) {
    const std::uint32_t run = i % runs, head = i / runs;
    const std::int64_t at = (head / heads * d.heads + h + head % heads) * d.runs + run;
    sum += static_cast<double>(d.sums[at * d.to.channels + c]);
  }
  shared[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double total = 0;
  for (int i = 0; i < kThreads; ++i) total += shared[i];
  d.write(h * d.to.head + c * d.to.channel, static_cast<float>(total));
}

std::int64_t runs_of(const Problem& p) { return blocks_for(p.tokens, kRunRows); }

struct WeightScratch {
  float* sums;
  std::byte* part;  // [batch, heads, tokens, dim_v], of the type of o
  std::byte* rest;
};

WeightScratch lay_out(const Problem& p, Layout& layout) {
  WeightScratch scratch{};
  scratch.sums = layout.take<float>(p.batch * p.heads * runs_of(p) * p.dim_v);
  scratch.part = layout.take<std::byte>(
      static_cast<std::int64_t>(scratch_bytes(p, p.heads, p.tokens, p.dim_v)));
  scratch.rest = layout.take<std::byte>(0);
  return scratch;
}

Problem forward_of(Problem p, Kind kind) {
  p.op = Op::forward;
  return part_of(p, kind);
}

View gradient_of(const Call& call, Kind kind) {
  const AttentionGradients& grads = call.grads;
  if (grads.dmix.given()) return grads.dmix;
  return kind == Kind::lln ? grads.dlln_weight : grads.ddiag_weight;
}

// The forward pass of one part, into `o`.
void make_part(const Call& call, Kind kind, const View& o, std::byte* workspace) {
  Call part = part_of(call, kind);
  part.problem.op = Op::forward;
  part.out.o = o;
  part.workspace = workspace;
  run_part(part);
}

void launch_dots(const Call& call, Kind kind, const View& o, float* sums) {
  const Problem& p = call.problem;
  const View to = gradient_of(call, kind);
  PartDots d{};
  d.g = rows_of(call.grads.g);
  d.part = rows_of(o);
  d.batches = p.batch;
  d.heads = p.heads;
  d.tokens = p.tokens;
  d.runs = runs_of(p);
  d.dim_v = static_cast<int>(p.dim_v);
  d.sums = sums;
  d.to = {static_cast<float*>(to.data),
          to.stride[0],
          to.stride[1],
          to.stride[2],
          to.stride[3],
          to.shape[1],
          to.shape[3],
          false};
  // Weights of tokens have a batch, heads and tokens; one of each is a weight of all as well.
  d.to.per_token = to.shape[2] == p.tokens && to.shape[0] == p.batch && to.shape[1] == p.heads &&
                   to.shape[3] == 1;
  const bool mix = call.grads.dmix.given();  // w1 = mix, w2 = 1 - mix
  d.sign = mix && kind == Kind::diag ? -1 : 1;
  d.add = mix && kind == Kind::diag;
  const auto stream = static_cast<cudaStream_t>(call.stream);
  const bool whole = p.dim_v % 8 == 0 && has_whole_pieces(call.grads.g) && has_whole_pieces(o);
  launch("dot_parts", dot_kernel(p.dtype, whole),
         LaunchShape{d.batches * d.heads * d.runs, kThreads, 0, stream}, d);
  if (d.to.per_token) return;
  launch("add_runs", add_runs, LaunchShape{d.to.heads * d.to.channels, kThreads, 0, stream}, d);
}

}  // namespace

bool wants_weights(const Call& call) {
  const AttentionGradients& grads = call.grads;
  return grads.dmix.given() || grads.dlln_weight.given() || grads.ddiag_weight.given();
}

Call without_weights(const Call& call) {
  Call rest = call;
  rest.grads.dmix = rest.grads.dlln_weight = rest.grads.ddiag_weight = {};
  return rest;
}

std::size_t bytes_with_weights(const Problem& p, std::size_t rest, int workers) {
  for (const Kind kind : {Kind::lln, Kind::diag}) {
    rest = std::max(rest, part_bytes(forward_of(p, kind), workers));
  }
  Layout layout(nullptr);
  lay_out(p, layout);
  return layout.bytes() + rest;
}

void run_with_weights(const Call& call, void (*run)(const Call&)) {
  const Problem& p = call.problem;
  Layout layout(call.workspace);
  const WeightScratch scratch = lay_out(p, layout);
  Call rest = without_weights(call);
  rest.workspace = scratch.rest;
  run(rest);
  const View o = scratch_like(call.grads.g, scratch.part);
  // Kernels write no row of sequences whose cumulative lengths are wrong.
  if (p.packed) {
    const std::size_t bytes = scratch_bytes(p, p.heads, p.tokens, p.dim_v);
    check(cudaMemsetAsync(scratch.part, 0, bytes, static_cast<cudaStream_t>(call.stream)),
          "cudaMemsetAsync");
  }
  for (const Kind kind : {Kind::lln, Kind::diag}) {
    if (!gradient_of(call, kind).given()) continue;
    make_part(call, kind, o, scratch.rest);
    launch_dots(call, kind, o, scratch.sums);
  }
}

}  // namespace lln::cuda
