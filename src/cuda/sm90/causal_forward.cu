// The launches of the causal forward walk on compute capability 9.0.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/causal_forward.cuh"

#include "cuda/sm90/causal.h"
#include "cuda/tiled_causal_launch.cuh"

namespace lln::cuda::sm90 {
namespace {

template <int kDim, bool kDiag>
void forward_of_width(const CausalCall& causal, const CausalPlan& plan) {
  if (plan.pieces) launch_before<kDim>(causal, plan);
  const auto kernel = causal.given.s == nullptr ? causal_forward<kDim, kDiag, false>
                                                : causal_forward<kDim, kDiag, true>;
  launch("causal_forward", kernel, plan.jobs * causal.call.heads, ForwardShape<kDim>::kThreads,
         ForwardShape<kDim>::kShared, plan.stream, causal);
}

}  // namespace

void launch_causal_forward(const CausalCall& causal, const CausalPlan& plan) {
  launch_by_form(causal, plan,
                 {{forward_of_width<64, false>, forward_of_width<64, true>},
                  {forward_of_width<128, false>, forward_of_width<128, true>}});
}

}  // namespace lln::cuda::sm90
