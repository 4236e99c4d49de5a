// The two parts by the kernels of their own, and their products with g.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/weight_gradients.h"

#include <algorithm>

#include "cuda/device_call.h"
#include "cuda/launch.h"
#include "cuda/mma.cuh"
#include "cuda/tiled_plan.h"
#include "cuda/warp.cuh"

namespace lln::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kRunRows = 256;  // of a block
constexpr int kMostPairs = 4;  // of channels to a lane: 256 channels

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

__device__ const std::uint32_t* row_of(const Rows& rows, std::int64_t b, std::int64_t h,
                                       std::int64_t n) {
  const auto* const data = static_cast<const std::uint16_t*>(rows.data);
  return reinterpret_cast<const std::uint32_t*>(data + b * rows.batch + h * rows.head +
                                                n * rows.token);
}

// A warp takes a row; a block the rows of one run.
template <class T>
__global__ void __launch_bounds__(kThreads) dot_parts(const __grid_constant__ PartDots d) {
  __shared__ float2 shared[kWarps][kMostPairs * kWarp];
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const std::int64_t run = blockIdx.x % d.runs, head = blockIdx.x / d.runs;
  const std::int64_t h = head % d.heads, b = head / d.heads;
  const std::int64_t end = min((run + 1) * kRunRows, d.tokens);
  const int pairs = d.dim_v / 2;
  float2 sums[kMostPairs] = {};
  for (std::int64_t n = run * kRunRows + warp; n < end; n += kWarps) {
    const std::uint32_t* const g = row_of(d.g, b, h, n);
    const std::uint32_t* const part = row_of(d.part, b, h, n);
    float2 x[kMostPairs] = {};
    bool zero = true;
#pragma unroll
    for (int i = 0; i < kMostPairs; ++i) {
      const int pair = lane + i * kWarp;
      if (pair < pairs) x[i] = unpack<T>(part[pair]);
      zero = zero && x[i].x == 0 && x[i].y == 0;
    }
    // A row that sees no key is 0, whatever its gradient holds.
    const bool seen = __any_sync(kAllLanes, !zero);
    float row = 0;
#pragma unroll
    for (int i = 0; i < kMostPairs; ++i) {
      const int pair = lane + i * kWarp;
      if (pair >= pairs || !seen) continue;
      const float2 y = unpack<T>(g[pair]);
      const float2 both{y.x * x[i].x, y.y * x[i].y};
      row += both.x + both.y;
      sums[i].x += both.x;
      sums[i].y += both.y;
    }
    if (!d.to.per_token) continue;
    row = warp_sum(row);
    if (lane == 0) d.write(b * d.to.batch + h * d.to.head + n * d.to.token, row);
  }
  if (d.to.per_token) return;
#pragma unroll
  for (int i = 0; i < kMostPairs; ++i) shared[warp][lane + i * kWarp] = sums[i];
  __syncthreads();
  float2 total{0, 0};
  for (int w = 0; w < kWarps && static_cast<int>(threadIdx.x) < pairs; ++w) {
    total.x += shared[w][threadIdx.x].x;
    total.y += shared[w][threadIdx.x].y;
  }
  float* const to = d.sums + std::int64_t{blockIdx.x} * d.to.channels;
  if (d.to.channels > 1) {
    if (static_cast<int>(threadIdx.x) < pairs) reinterpret_cast<float2*>(to)[threadIdx.x] = total;
    return;
  }
  const float channels = warp_sum(total.x + total.y);
  __syncthreads();  // all have read what is overwritten
  if (lane == 0) shared[0][warp].x = channels;
  __syncthreads();
  if (threadIdx.x != 0) return;
  float sum = 0;
  for (int w = 0; w < kWarps; ++w) sum += shared[0][w].x;
  *to = sum;
}
static_assert(kThreads >= kMostPairs * kWarp, "a thread for every pair of channels");

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
  std::byte* part;  // [batch, heads, tokens, dim_v], 16-bit
  std::byte* rest;
};

WeightScratch lay_out(const Problem& p, Layout& layout) {
  const std::int64_t heads = p.batch * p.heads;
  WeightScratch scratch{};
  scratch.sums = layout.take<float>(heads * runs_of(p) * p.dim_v);
  scratch.part =
      reinterpret_cast<std::byte*>(layout.take<std::uint16_t>(heads * p.tokens * p.dim_v));
  scratch.rest = layout.take<std::byte>(0);
  return scratch;
}

Problem forward_of(Problem p, Kind kind) {
  p.op = Op::forward;
  p.kind = kind;
  if (kind == Kind::lln) p.diag_block = 0;
  return p;
}

// The kernel that the call of a part would run on by itself; the plain one takes them all.
const Kernel& kernel_for(const Problem& part) {
  const auto all = kernels(Op::forward);
  return *std::ranges::find_if(all, [&](const Kernel& kernel) {
    return kernel.device == DeviceKind::cuda && kernel.refusal(part).empty();
  });
}

View gradient_of(const Call& call, Kind kind) {
  const AttentionGradients& grads = call.grads;
  if (grads.dmix.given()) return grads.dmix;
  return kind == Kind::lln ? grads.dlln_weight : grads.ddiag_weight;
}

// The forward pass of one part, into `o`.
void run_part(const Call& call, Kind kind, const View& o, std::byte* workspace) {
  Call part = call;
  part.problem = forward_of(call.problem, kind);
  part.options.kind = kind;
  part.in.mix = part.in.lln_weight = part.in.diag_weight = {};
  if (kind == Kind::diag) part.in.alpha = part.in.beta = {};
  part.grads = {};
  part.out = {.o = o};
  part.workspace = workspace;
  const Kernel& kernel = kernel_for(part.problem);
  if (kernel.name == plain_kernel(Op::forward).name) return run_plain(part);
  kernel.run(part);
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
  launch("dot_parts", p.dtype == DType::bf16 ? dot_parts<Bf16> : dot_parts<F16>,
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
    const Problem part = forward_of(p, kind);
    rest = std::max(rest, kernel_for(part).workspace_bytes(part, workers));
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
  const std::int64_t token = p.dim_v, head = p.tokens * token, batch = p.heads * head;
  const View o{scratch.part,
               p.dtype,
               p.device,
               {p.batch, p.heads, p.tokens, p.dim_v},
               {batch, head, token, 1}};
  // Kernels write no row of sequences whose cumulative lengths are wrong.
  if (p.packed) {
    const auto bytes = static_cast<std::size_t>(p.batch * batch) * size_of(p.dtype);
    check(cudaMemsetAsync(scratch.part, 0, bytes, static_cast<cudaStream_t>(call.stream)),
          "cudaMemsetAsync");
  }
  for (const Kind kind : {Kind::lln, Kind::diag}) {
    if (!gradient_of(call, kind).given()) continue;
    run_part(call, kind, o, scratch.rest);
    launch_dots(call, kind, o, scratch.sums);
  }
}

}  // namespace lln::cuda
