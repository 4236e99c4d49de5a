// What becomes of moments: alpha and beta, running moments, and numbers for the host.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/device_call.h"
#include "cuda/launch.h"
#include "cuda/moments_pairs.cuh"

namespace lln::cuda {
namespace {

struct RunningSource {
  const RunningMoments::Head* heads;  // of q, then of k
  MatchingRule rule;
  __device__ Scales operator()(std::int64_t, std::int64_t head_k, std::int64_t heads_k) const {
    const RunningMoments::Head q = heads[head_k], k = heads[heads_k + head_k];
    return scales_of(q.weight != 0 && k.weight != 0, q.variance, k.variance, 0, rule);
  }
};

struct OneSource {
  __device__ Scales operator()(std::int64_t, std::int64_t, std::int64_t) const { return {1, 1}; }
};

// A thread for every (sequence, key head).
template <class Source>
__global__ void __launch_bounds__(kMomentThreads)
    scales_kernel(const ScaleOutputs out, const __grid_constant__ Source source) {
  const std::int64_t pair = static_cast<std::int64_t>(blockIdx.x) * kMomentThreads + threadIdx.x;
  if (pair >= out.sequences * out.heads_k) return;
  const std::int64_t s = pair / out.heads_k, head_k = pair % out.heads_k;
  write_scales(out, s, head_k, source(s, head_k, out.heads_k));
}

__global__ void __launch_bounds__(kMomentThreads)
    frozen_kernel(const ScaleOutputs out, const Scale alpha, const Scale beta) {
  const std::int64_t heads = out.heads_k * out.group;
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kMomentThreads + threadIdx.x;
  if (i >= out.sequences * heads) return;
  const std::int64_t s = i / heads, h = i % heads;
  out.alpha.data[s * out.alpha.sequence + h * out.alpha.head] = scale_at(alpha, s, h);
  if (h >= out.heads_k) return;
  out.beta.data[s * out.beta.sequence + h * out.beta.head] = scale_at(beta, s, h);
}

// One block: the scales of all pairs together.
__global__ void __launch_bounds__(kMomentThreads)
    pooled_kernel(const ScaleOutputs out, const PairMoments all, int dim,
                  const __grid_constant__ MatchingRule rule) {
  __shared__ Moments warps[kMomentWarps];
  __shared__ Scales scales;
  const std::int64_t pairs = out.sequences * out.heads_k;
  Moments q, k;
  for (std::int64_t i = threadIdx.x; i < pairs; i += kMomentThreads) {
    q = merged(q, all.q[i]);
    k = merged(k, all.k[i]);
  }
  q = block_merged(q, warps);
  __syncthreads();
  k = block_merged(k, warps);
  if (threadIdx.x == 0) scales = scales_of(q, k, dim, rule);
  __syncthreads();
  for (std::int64_t i = threadIdx.x; i < pairs; i += kMomentThreads) {
    write_scales(out, i / out.heads_k, i % out.heads_k, scales);
  }
}

// A warp for every key head, of q in the first half of the grid's warps and of k in the second.
__global__ void __launch_bounds__(kMomentThreads)
    update_kernel(const PairMoments pairs, std::int64_t sequences, std::int64_t heads_k,
                  RunningMoments::Head* heads, double decay) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * kMomentWarps + threadIdx.x / 32;
  if (i >= 2 * heads_k) return;
  const Moments* const from = i < heads_k ? pairs.q + i : pairs.k + i - heads_k;
  Moments own;
  for (std::int64_t s = threadIdx.x % 32; s < sequences; s += 32) {
    own = merged(own, from[s * heads_k]);
  }
  own = warp_merged(own);
  if (threadIdx.x % 32 != 0) return;
  RunningMoments::Head head = heads[i];
  take_step(head, decay, own);
  heads[i] = head;
}

ScaleOutputs outputs(const Problem& p, const MatchingOutputs& out) {
  return {{static_cast<float*>(out.alpha.data), out.alpha.stride[0], out.alpha.stride[1]},
          {static_cast<float*>(out.beta.data), out.beta.stride[0], out.beta.stride[1]},
          p.sequences,
          p.heads_k,
          p.heads / p.heads_k};
}

LaunchShape in_blocks(const MatchingCall& call, std::int64_t items, int each) {
  return {blocks_for(items, each), kMomentThreads, 0, static_cast<cudaStream_t>(call.stream)};
}

template <class Source>
void write_all(const MatchingCall& call, const MatchingOutputs& out, const Source& source) {
  const Problem& p = call.problem;
  launch("scales_kernel", scales_kernel<Source>,
         in_blocks(call, p.sequences * p.heads_k, kMomentThreads), outputs(p, out), source);
}

Scale broadcast(const ConstView& view) {
  return {static_cast<const float*>(view.data), view.shape[0] == 1 ? 0 : view.stride[0],
          view.shape[1] == 1 ? 0 : view.stride[1]};
}

RunningMoments::Head* heads_of(const DeviceRunningMoments& running) {
  return static_cast<RunningMoments::Head*>(running.heads.data);
}
static_assert(sizeof(RunningMoments::Head) == 3 * sizeof(double));

}  // namespace

void match_none(const MatchingCall& call, const MatchingOutputs& out) {
  write_all(call, out, OneSource{});
}

void match_frozen(const MatchingCall& call, const MatchingOutputs& out) {
  const Problem& p = call.problem;
  launch("frozen_kernel", frozen_kernel, in_blocks(call, p.sequences * p.heads, kMomentThreads),
         outputs(p, out), broadcast(call.in.alpha), broadcast(call.in.beta));
}

void match_per_head(const MatchingCall& call, const MatchingOutputs& out,
                    const MatchingRule& rule) {
  sum_pairs(call, true, outputs(call.problem, out), rule);
}

void match_paper(const MatchingCall& call, const MatchingOutputs& out, const MatchingRule& rule) {
  const PairMoments pairs = sum_pairs(call, true);
  if (call.problem.sequences == 0) return;
  launch("pooled_kernel", pooled_kernel, in_blocks(call, 1, 1), outputs(call.problem, out), pairs,
         static_cast<int>(call.problem.dim), rule);
}

void match_running(const MatchingCall& call, const MatchingOutputs& out, const MatchingRule& rule,
                   const DeviceRunningMoments& running) {
  write_all(call, out, RunningSource{heads_of(running), rule});
}

void update_running(const MatchingCall& call, const DeviceRunningMoments& running) {
  const PairMoments pairs = sum_pairs(call, true);
  const Problem& p = call.problem;
  launch("update_kernel", update_kernel, in_blocks(call, 2 * p.heads_k, kMomentWarps), pairs,
         p.sequences, p.heads_k, heads_of(running), running.decay);
}

void sum_heads(const MatchingCall& call, std::span<Moments> out) {
  const PairMoments pairs = sum_pairs(call, false);
  const auto stream = static_cast<cudaStream_t>(call.stream);
  check(cudaMemcpyAsync(out.data(), pairs.k, out.size_bytes(), cudaMemcpyDeviceToHost, stream),
        "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

}  // namespace lln::cuda
