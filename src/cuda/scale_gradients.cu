// Two passes over q and dq, and over k and dk: sums of the jobs of sequences, then over jobs.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/scale_gradients.h"

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/part_calls.h"
#include "cuda/row_pieces.cuh"
#include "cuda/tiled_plan.h"
#include "cuda/warp.cuh"

namespace lln::cuda {
namespace {

constexpr int kWarp = 32;
constexpr int kThreads = 256;
constexpr Jobs kJobs{};

// No scale is nearer to 0 while a call runs: dq / alpha would be lost. The weights are the same to
// rounding, and dq is put right afterwards. The least numbers of bf16 and f32 are far below.
constexpr float kLeastScale = 0x1p-60F;

__device__ float held_off(float scale) {
  return fabsf(scale) < kLeastScale ? copysignf(kLeastScale, scale) : scale;
}

// alpha and beta, [sequence, head] each.
struct HeldScales {
  Scale alpha, beta;
  float *to_alpha, *to_beta;
  std::int64_t heads, heads_k, alphas, betas;
};

__global__ void __launch_bounds__(kThreads) hold_scales(const __grid_constant__ HeldScales held) {
  const std::int64_t i = std::int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (i < held.alphas) {
    held.to_alpha[i] = held_off(scale_at(held.alpha, i / held.heads, i % held.heads));
  }
  if (i < held.betas) {
    held.to_beta[i] = held_off(scale_at(held.beta, i / held.heads_k, i % held.heads_k));
  }
}

// One of the two gradients: x is q or k, dx its gradient.
struct ScaleDots {
  Rows x, dx;
  Scale scale;
  Sequences sequences;
  std::uint32_t heads, pieces;  // pieces of a row (row_pieces.cuh)
  bool aligned;
  float* sums;  // [job, head]
  float* to;    // [1 or sequences, 1 or heads]
  std::int64_t to_sequence, to_head;
  bool by_sequence, by_head;
};

__device__ float block_sum(float own) {
  __shared__ float warps[kThreads / kWarp];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  own = warp_sum(own);
  if (threadIdx.x % kWarp == 0) warps[warp] = own;
  __syncthreads();
  float sum = 0;
  for (int w = 0; w < kThreads / kWarp; ++w) sum += warps[w];
  return sum;
}

// A block takes a job: some rows of a sequence. Rows whose gradient is 0 may be padding and hold
// anything.
template <class T, bool kWhole, bool kKeys>
__global__ void __launch_bounds__(kThreads) dot_scales(const __grid_constant__ ScaleDots d) {
  using Piece = RowPiece<T, kWhole>;
  const std::int64_t job = blockIdx.x / d.heads, h = blockIdx.x % d.heads;
  const JobPlace place = find_job<kKeys>(d.sequences, job);
  float sum = 0, scale = 1;
  if (place.s >= 0) {
    const DeviceSequence& at = place.sequence;
    const Jobs& jobs = kKeys ? d.sequences.k_jobs : d.sequences.q_jobs;
    const std::int64_t tokens = kKeys ? at.k_tokens : at.q_tokens;
    const std::int64_t first = place.index * jobs.piece(tokens);
    const auto count =
        static_cast<std::uint32_t>(max(min(jobs.piece(tokens), tokens - first), std::int64_t{0}));
    const float given = scale_at(d.scale, place.s, h);
    scale = held_off(given);
    const bool held = scale != given && !isnan(given);
    for (std::uint32_t i = threadIdx.x; i < count * d.pieces; i += kThreads) {
      const std::int64_t n = (kKeys ? at.k_begin : at.q_begin) + first + i / d.pieces;
      const int channel = static_cast<int>(i % d.pieces) * Piece::kCount;
      T* const dx_at = row_at<T>(d.dx, at.batch, h, n, channel);
      Piece x, dx;
      x.load(row_at<const T>(d.x, at.batch, h, n, channel), d.aligned);
      dx.load(dx_at, d.aligned);
#pragma unroll
      for (int e = 0; e < Piece::kCount; ++e) {
        if (dx.x[e] != 0) sum = fmaf(x.x[e], dx.x[e], sum);
        if (held) dx.x[e] *= given / scale;
      }
      if (held) dx.store(dx_at, d.aligned);
    }
  }
  sum = block_sum(sum);
  // A scale that is no number says nothing of rows that there are not.
  if (threadIdx.x == 0) d.sums[blockIdx.x] = sum == 0 ? 0 : sum / scale;
}

// One element of the gradient to a block: the sums of all jobs and heads that share it, in order.
template <bool kKeys>
__global__ void __launch_bounds__(kThreads) add_scales(const __grid_constant__ ScaleDots d) {
  __shared__ double shared[kThreads];
  const std::int64_t columns = d.by_head ? d.heads : 1;
  const std::int64_t s = blockIdx.x / columns, h = blockIdx.x % columns;
  std::int64_t first = 0, count = kKeys ? d.sequences.k_job_limit : d.sequences.q_job_limit;
  if (d.by_sequence) {
    const DeviceSequence at = sequence_at(d.sequences, s);
    first = kKeys ? at.k_first_job : at.q_first_job;
    count = kKeys ? d.sequences.k_jobs.count(at.k_tokens) : d.sequences.q_jobs.count(at.q_tokens);
  }
  const std::int64_t heads = d.by_head ? 1 : d.heads;
  double sum = 0;
  for (std::int64_t i = threadIdx.x; i < count * heads; i += kThreads) {
    sum += static_cast<double>(d.sums[(first + i / heads) * d.heads + h + i % heads]);
  }
  shared[threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  double total = 0;
  for (int i = 0; i < kThreads; ++i) total += shared[i];
  d.to[s * d.to_sequence + h * d.to_head] = static_cast<float>(total);
}

using DotKernel = void (*)(ScaleDots);

template <class T, bool kKeys>
DotKernel dot_kernel(bool whole) {
  return whole ? dot_scales<T, true, kKeys> : dot_scales<T, false, kKeys>;
}

template <bool kKeys>
void launch_dots(const Problem& p, const ScaleDots& dots, bool whole, cudaStream_t stream) {
  const std::int64_t jobs = kKeys ? dots.sequences.k_job_limit : dots.sequences.q_job_limit;
  launch(kKeys ? "dot_scales of keys" : "dot_scales of rows",
         p.dtype == DType::f32 ? dot_kernel<float, kKeys>(whole) : dot_kernel<Bf16, kKeys>(whole),
         LaunchShape{jobs * dots.heads, kThreads, 0, stream}, dots);
  const std::int64_t elements =
      (dots.by_sequence ? p.sequences : 1) * (dots.by_head ? std::int64_t{dots.heads} : 1);
  launch("add_scales", add_scales<kKeys>, LaunchShape{elements, kThreads, 0, stream}, dots);
}

struct ScaleScratch {
  void* table;
  float *alpha, *beta, *sums;
  std::byte* rest;
};

// Of LLN alone. Rows of q and of k are summed up one after the other, in the same memory.
ScaleScratch lay_out(const Problem& p, Layout& layout) {
  ScaleScratch scratch{};
  if (p.packed) scratch.table = layout.take<std::byte>(static_cast<std::int64_t>(table_bytes(p)));
  scratch.alpha = layout.take<float>(p.sequences * p.heads);
  scratch.beta = layout.take<float>(p.sequences * p.heads_k);
  const auto jobs = [&](std::int64_t tokens) {
    return p.packed ? kJobs.most(tokens, p.sequences) : p.sequences * kJobs.count(tokens);
  };
  scratch.sums =
      layout.take<float>(std::max(jobs(p.tokens) * p.heads, jobs(p.tokens_k) * p.heads_k));
  scratch.rest = layout.take<std::byte>(0);
  return scratch;
}

ConstView scales(float* data, const ConstView& like, std::int64_t sequences, std::int64_t heads) {
  return {data, DType::f32, like.device, {sequences, heads, 1, 1}, {heads, 1, 1, 1}};
}

// The padding of keys needs no table: its gradients are 0.
Call without_masks(const Call& call) {
  Call whole = call;
  whole.problem.masked = false;
  whole.in.key_lengths = {};
  whole.in.key_mask = {};
  return whole;
}

template <bool kKeys>
void launch_gradient(const Call& call, const DeviceCall& device, float* sums) {
  const Problem& p = call.problem;
  const View& to = kKeys ? call.grads.dbeta : call.grads.dalpha;
  if (!to.given()) return;
  const ConstView& x = kKeys ? call.in.k : call.in.q;
  const View& dx = kKeys ? call.grads.dk : call.grads.dq;
  const bool whole = p.dim % 8 == 0;
  const auto each = whole ? 16 / static_cast<std::int64_t>(size_of(p.dtype)) : 1;
  ScaleDots dots{};
  dots.aligned = has_whole_pieces(x) && has_whole_pieces(dx);
  dots.x = kKeys ? device.k : device.q;
  dots.dx = kKeys ? device.dk : device.dq;
  dots.scale = kKeys ? device.beta : device.alpha;
  dots.sequences = device.sequences;
  dots.heads = static_cast<std::uint32_t>(kKeys ? p.heads_k : p.heads);
  dots.pieces = static_cast<std::uint32_t>(p.dim / each);
  dots.sums = sums;
  dots.to = static_cast<float*>(to.data);
  dots.to_sequence = to.stride[0];
  dots.to_head = to.stride[1];
  dots.by_sequence = to.shape[0] == p.sequences;
  dots.by_head = to.shape[1] == std::int64_t{dots.heads};
  launch_dots<kKeys>(p, dots, whole, static_cast<cudaStream_t>(call.stream));
}

// `run` with scales that are held off 0, then the sums.
void run_lln(const Call& call, void (*run)(const Call&)) {
  const Problem& p = call.problem;
  Layout layout(call.workspace);
  const ScaleScratch scratch = lay_out(p, layout);
  const Call whole = without_masks(call);
  DeviceCall device = make_device_call(whole);
  const HeldScales held{device.alpha, device.beta, scratch.alpha,         scratch.beta,
                        p.heads,      p.heads_k,   p.sequences * p.heads, p.sequences * p.heads_k};
  launch("hold_scales", hold_scales,
         LaunchShape{blocks_for(std::max(held.alphas, held.betas), kThreads), kThreads, 0,
                     static_cast<cudaStream_t>(call.stream)},
         held);
  // One whose gradient nobody asks for stays as it is.
  Call rest = without_scales(call);
  if (call.grads.dalpha.given()) {
    rest.in.alpha = scales(scratch.alpha, call.in.alpha, p.sequences, p.heads);
  }
  if (call.grads.dbeta.given()) {
    rest.in.beta = scales(scratch.beta, call.in.beta, p.sequences, p.heads_k);
  }
  rest.workspace = scratch.rest;
  run(rest);
  prepare_sequences(whole, kJobs, kJobs, scratch.table, device);
  launch_gradient<false>(call, device, scratch.sums);
  launch_gradient<true>(call, device, scratch.sums);
}

// Of LLN+Diag: then the backward pass of the LLN part, whose gradients nobody asks for.
void run_both(const Call& call, void (*run)(const Call&)) {
  run(without_scales(call));
  Call part = part_of(call, Kind::lln);  // `run` is done with the workspace
  part.workspace = call.workspace + part_gradient_bytes(call.problem);
  part.grads = part_gradients(call, call.workspace);
  part.grads.saved = call.grads.saved;
  part.grads.dalpha = call.grads.dalpha;
  part.grads.dbeta = call.grads.dbeta;
  weigh_gradient(call, make_device_call(call).lln_weight, call.workspace);
  run_part(part);
}

}  // namespace

bool wants_scales(const Call& call) {
  return call.grads.dalpha.given() || call.grads.dbeta.given();
}

Call without_scales(const Call& call) {
  Call rest = call;
  rest.grads.dalpha = rest.grads.dbeta = {};
  return rest;
}

bool has_scales(const Problem& p) { return p.kind == Kind::lln_diag || p.dtype != DType::f16; }

std::size_t bytes_with_scales(const Problem& p, std::size_t rest, int workers) {
  if (p.kind == Kind::lln_diag) {
    return std::max(rest, part_gradient_bytes(p) + part_bytes(part_of(p, Kind::lln), workers));
  }
  Layout layout(nullptr);
  lay_out(p, layout);
  return layout.bytes() + rest;
}

void run_with_scales(const Call& call, void (*run)(const Call&)) {
  (call.problem.kind == Kind::lln ? run_lln : run_both)(call, run);
}

}  // namespace lln::cuda
