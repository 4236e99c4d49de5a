// The launches of the causal backward walks.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/tiled_causal_keys.cuh"
#include "cuda/tiled_causal_launch.cuh"
#include "cuda/tiled_causal_rows.cuh"

namespace lln::cuda {
namespace {

template <int kDim, bool kDiag>
void backward_of_width(const CausalCall& causal, const CausalPlan& plan) {
  const auto rows = plan.pieces ? causal_rows<kDim, kDiag, true> : causal_rows<kDim, kDiag, false>;
  if (plan.pieces) launch_before<kDim>(causal, plan);
  launch("causal_rows", rows, plan.jobs * causal.call.heads, CausalShape<kDim>::kThreads,
         CausalRowsShape<kDim>::kShared, plan.stream, causal);
  if (plan.pieces) launch_join_behind(causal, plan);
  launch("causal_keys", causal_keys<kDim, kDiag>, plan.jobs * causal.call.heads_k,
         CausalShape<kDim>::kThreads, CausalKeysShape<kDim>::kShared, plan.stream, causal);
}

}  // namespace

void launch_causal_backward(const CausalCall& causal, const CausalPlan& plan) {
  launch_by_form(causal, plan,
                 {{backward_of_width<64, false>, backward_of_width<64, true>},
                  {backward_of_width<128, false>, backward_of_width<128, true>}});
}

}  // namespace lln::cuda
