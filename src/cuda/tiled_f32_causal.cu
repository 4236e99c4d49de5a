// The tiled family of causal LLN and LLN+Diag in f32: which calls it takes and what is launched.
// Pieces, scratch memory and heads that are out of reach are those of tiled_causal_plan.h. Diag is
// added to the results of LLN in place (tiled_f32_diag.h).
// SPDX-License-Identifier: Apache-2.0
#include "cuda/tiled_f32_causal.h"

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/tiled_causal_plan.h"
#include "cuda/tiled_f32_causal_forward.cuh"
#include "cuda/tiled_f32_causal_keys.cuh"
#include "cuda/tiled_f32_causal_rows.cuh"
#include "cuda/tiled_f32_diag.h"
#include "cuda/tiled_plan.h"

namespace lln::cuda {
namespace {

constexpr int kLargest = 128;

std::string refusal(const Problem& p) {
  if (p.dtype != DType::f32) return "takes f32 alone";
  // The widest walks take more shared memory than some devices have.
  const int needed = p.op == Op::backward ? FloatCausalKeysShape<kLargest>::kShared
                                          : FloatCausalForwardShape<kLargest>::kShared;
  const int largest = lacks_shared_memory(p, needed) ? kLargest / 2 : kLargest;
  if (std::max(p.dim, p.dim_v) > largest) {
    return "takes dim and dim_v up to " + std::to_string(largest);
  }
  const std::string why = causal_refusal(p);
  return why.empty() && p.has_diag() ? float_diag_refusal(p) : why;
}

// s and K before every piece.
template <int kDim>
void launch_before(const CausalCall& causal, const CausalPlan& plan) {
  launch("float_causal_key_sums", float_causal_key_sums<kDim>,
         LaunchShape{plan.jobs * causal.call.heads_k, 2 * kDim, kFloatCausalSumsShared<kDim>,
                     plan.stream},
         causal);
  launch_join_before(causal, plan);
}

template <int kDim>
void launch_forward(const CausalCall& causal, const CausalPlan& plan) {
  if (plan.pieces) launch_before<kDim>(causal, plan);
  launch("float_causal_forward", float_causal_forward<kDim>,
         LaunchShape{plan.jobs * causal.call.heads, 2 * kDim,
                     FloatCausalForwardShape<kDim>::kShared, plan.stream},
         causal);
}

template <int kDim>
void launch_backward(const CausalCall& causal, const CausalPlan& plan) {
  const DeviceCall& call = causal.call;
  if (plan.pieces) launch_before<kDim>(causal, plan);
  launch("float_causal_rows", float_causal_rows<kDim>,
         LaunchShape{plan.jobs * call.heads, 2 * kDim, FloatCausalRowsShape<kDim>::kShared,
                     plan.stream},
         causal);
  if (plan.pieces) {
    launch("float_causal_row_sums", float_causal_row_sums<kDim>,
           LaunchShape{plan.jobs * call.heads, 2 * kDim, kFloatCausalSumsShared<kDim>, plan.stream},
           causal);
    launch_join_behind(causal, plan);
  }
  launch("float_causal_keys", float_causal_keys<kDim>,
         LaunchShape{plan.jobs * call.heads_k, 2 * kDim, FloatCausalKeysShape<kDim>::kShared,
                     plan.stream},
         causal);
}

template <int kDim>
void launch_lln(Op op, const CausalWork& work) {
  (op == Op::backward ? launch_backward<kDim> : launch_forward<kDim>)(work.causal, work.plan);
}

void launch_lln(const Problem& p, const CausalWork& work) {
  switch (tiled_width(p)) {
    case 32:
      return launch_lln<32>(p.op, work);
    case 64:
      return launch_lln<64>(p.op, work);
    default:
      return launch_lln<128>(p.op, work);
  }
}

std::size_t bytes(const Problem& p, int workers) {
  const std::size_t diag = p.has_diag() ? float_diag_bytes(p) : 0;
  return causal_bytes(p, causal_scratch_bytes(p) + diag, workers);
}

void run(const Call& call) {
  const Problem& p = call.problem;
  if (!tiled_takes(call)) return plain_kernel(p.op).run(call);
  const CausalWork work = prepare_causal(call);
  if (p.has_diag()) {
    Call diag_call = call;
    diag_call.workspace = call.workspace + causal_scratch_bytes(p);
    // Before the first kernel of LLN: those of Diag read their table of sequences early.
    const TiledWork diag = prepare_float_diag(diag_call);
    launch_lln(p, work);
    launch_float_diag(p.op, diag);
  } else {
    launch_lln(p, work);
  }
  run_plain_again(call, work);
}

}  // namespace

std::vector<Kernel> tiled_f32_causal_forward_kernels() {
  return {{"cuda-tiled-f32-causal", refusal, bytes, run, DeviceKind::cuda}};
}
std::vector<Kernel> tiled_f32_causal_backward_kernels() {
  return tiled_f32_causal_forward_kernels();
}

}  // namespace lln::cuda
