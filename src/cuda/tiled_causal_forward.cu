// The launches of the causal forward walk.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/tiled_causal_forward.cuh"
#include "cuda/tiled_causal_launch.cuh"

namespace lln::cuda {
namespace {

template <int kDim, bool kGiven>
void forward_of_width(const CausalCall& causal, const CausalPlan& plan) {
  if (plan.pieces) launch_before<kDim>(causal, plan);
  const auto kernel = causal.call.kind == Kind::lln ? causal_forward<kDim, false, kGiven>
                                                    : causal_forward<kDim, true, kGiven>;
  launch("causal_forward", kernel, plan.jobs * causal.call.heads, CausalShape<kDim>::kThreads,
         CausalForwardShape<kDim>::kShared, plan.stream, causal);
}

}  // namespace

void launch_causal_forward(const CausalCall& causal, const CausalPlan& plan) {
  if (causal.given.s == nullptr) {
    plan.width == 64 ? forward_of_width<64, false>(causal, plan)
                     : forward_of_width<128, false>(causal, plan);
  } else {
    plan.width == 64 ? forward_of_width<64, true>(causal, plan)
                     : forward_of_width<128, true>(causal, plan);
  }
}

}  // namespace lln::cuda
