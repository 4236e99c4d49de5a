// The tiled family of LLN in f32: which calls it takes and what is launched.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/tiled_f32.h"

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/parameter_gradients.h"
#include "cuda/tiled_f32.cuh"
#include "cuda/tiled_f32_keys_backward.cuh"
#include "cuda/tiled_f32_rows_backward.cuh"

namespace lln::cuda {
namespace {

constexpr int kLargest = 128;

std::string refusal(const Problem& p) {
  if (p.kind != Kind::lln) return "takes kind lln alone";
  if (p.dtype != DType::f32) return "takes f32 alone";
  // The widest row gradients take more shared memory than some devices have.
  const bool narrow =
      p.op == Op::backward && lacks_shared_memory(p, FloatRowsBackwardShape<kLargest>::kShared);
  const int largest = narrow ? kLargest / 2 : kLargest;
  if (std::max(p.dim, p.dim_v) > largest) {
    return "takes dim and dim_v up to " + std::to_string(largest);
  }
  return tiled_refusal(p);
}

// (c, C) of all sequences.
template <int kDim>
void launch_state(const TiledCall& tiled, const TiledPlan& plan) {
  using Shape = FloatKeysShape<kDim>;
  const DeviceCall& call = tiled.call;
  if (plan.has_keys) {
    launch("float_key_sums", float_key_sums<kDim>,
           LaunchShape{plan.key_jobs * call.heads_k, Shape::kThreads, Shape::kShared, plan.stream},
           tiled, plan.whole);
    if (!plan.whole) launch_join_keys(tiled, plan.stream);
  }
  launch_given_state(tiled, plan);
}

template <int kDim>
void launch_forward(const TiledCall& tiled, const TiledPlan& plan) {
  launch_state<kDim>(tiled, plan);
  if (!plan.has_rows) return;
  launch("float_rows_forward", float_rows_forward<kDim>,
         LaunchShape{plan.row_jobs * tiled.call.heads, kRowsThreads, kFloatRowsShared<kDim>,
                     plan.stream, true},
         tiled);
}

template <int kDim>
void launch_backward(const TiledCall& tiled, const TiledPlan& plan) {
  using Shape = FloatRowsBackwardShape<kDim>;
  const DeviceCall& call = tiled.call;
  if (!plan.state_given) launch_state<kDim>(tiled, plan);
  if (plan.has_rows) {
    // The first kernel of a call waits for what came before it in the ordinary way.
    launch("float_rows_backward", float_rows_backward<kDim>,
           LaunchShape{plan.row_jobs * call.heads, Shape::kThreads, Shape::kShared, plan.stream,
                       !plan.state_given},
           tiled);
    launch_join_rows(tiled, plan.stream);
  }
  launch_state_gradients(tiled, plan);
  if (!plan.has_keys) return;
  launch("float_keys_backward", float_keys_backward<kDim>,
         LaunchShape{plan.key_rows_jobs * call.heads_k, kKeysBackwardThreads<kDim>,
                     kFloatKeysBackwardShared<kDim>, plan.stream, true},
         tiled);
}

template <int kDim>
void launch_all(Op op, const TiledWork& work) {
  (op == Op::backward ? launch_backward<kDim> : launch_forward<kDim>)(work.tiled, work.plan);
}

void run(const Call& call) {
  if (parameters_apart(call)) return run_with_parameters(call, run);
  if (!tiled_takes(call)) return run_plain(call);
  launch_float_lln(call.problem.op, prepare_tiled(call));
}

}  // namespace

void launch_float_lln(Op op, const TiledWork& work) {
  switch (work.plan.width) {
    case 32:
      return launch_all<32>(op, work);
    case 64:
      return launch_all<64>(op, work);
    default:
      return launch_all<128>(op, work);
  }
}

std::vector<Kernel> tiled_f32_forward_kernels() {
  return {{"cuda-tiled-f32", refusal, tiled_bytes, run, DeviceKind::cuda, /*takes_pieces=*/true,
           tiled_call_bytes}};
}
std::vector<Kernel> tiled_f32_backward_kernels() { return tiled_f32_forward_kernels(); }

}  // namespace lln::cuda
