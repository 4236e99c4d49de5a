// The tiled forward pass of LLN in f32: which calls it takes and what is launched.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/tiled_f32.h"

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/tiled_f32.cuh"
#include "cuda/tiled_plan.h"

namespace lln::cuda {
namespace {

constexpr std::int64_t kLargest = 128;

std::string refusal(const Problem& p) {
  if (p.kind != Kind::lln) return "takes kind lln alone";
  if (p.dtype != DType::f32) return "takes f32 alone";
  if (std::max(p.dim, p.dim_v) > kLargest) {
    return "takes dim and dim_v up to " + std::to_string(kLargest);
  }
  return tiled_refusal(p);
}

template <int kDim>
void launch_all(const TiledCall& tiled, const TiledPlan& plan) {
  using Shape = FloatKeysShape<kDim>;
  const DeviceCall& call = tiled.call;
  if (plan.has_keys) {
    launch("float_key_sums", float_key_sums<kDim>,
           LaunchShape{plan.key_jobs * call.heads_k, Shape::kThreads, Shape::kShared, plan.stream},
           tiled, plan.whole);
    if (!plan.whole) launch_join_keys(tiled, plan.stream);
  }
  launch_given_state(tiled, plan);
  if (!plan.has_rows) return;
  launch("float_rows_forward", float_rows_forward<kDim>,
         LaunchShape{plan.row_jobs * call.heads, kRowsThreads, kFloatRowsShared<kDim>, plan.stream,
                     true},
         tiled);
}

void run(const Call& call) {
  if (!tiled_takes(call)) return plain_kernel(call.problem.op).run(call);
  const TiledWork work = prepare_tiled(call);
  switch (work.plan.width) {
    case 32:
      return launch_all<32>(work.tiled, work.plan);
    case 64:
      return launch_all<64>(work.tiled, work.plan);
    default:
      return launch_all<128>(work.tiled, work.plan);
  }
}

}  // namespace

std::vector<Kernel> tiled_f32_forward_kernels() {
  return {{"cuda-tiled-f32", refusal, tiled_bytes, run, DeviceKind::cuda, /*takes_pieces=*/true,
           tiled_call_bytes}};
}

}  // namespace lln::cuda
