// The launches of the causal backward walks on compute capability 9.0.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/causal.h"
#include "cuda/sm90/causal_keys.cuh"
#include "cuda/sm90/causal_rows.cuh"
#include "cuda/tiled_causal_launch.cuh"

namespace lln::cuda::sm90 {
namespace {

template <int kDim, bool kDiag>
void backward_of_width(const CausalCall& causal, const CausalPlan& plan) {
  const auto rows = plan.pieces ? causal_rows<kDim, kDiag, true> : causal_rows<kDim, kDiag, false>;
  if (plan.pieces) launch_before<kDim>(causal, plan);
  launch("causal_rows", rows, plan.jobs * causal.call.heads, Shape<kDim>::kTeam,
         RowsShape<kDim>::kShared, plan.stream, causal);
  if (plan.pieces) launch_join_behind(causal, plan);
  const auto keys = causal.call.heads == causal.call.heads_k ? causal_keys<kDim, kDiag, false>
                                                             : causal_keys<kDim, kDiag, true>;
  launch("causal_keys", keys, plan.jobs * causal.call.heads_k, Shape<kDim>::kTeam,
         KeysShape<kDim>::kShared, plan.stream, causal);
}

}  // namespace

void launch_causal_backward(const CausalCall& causal, const CausalPlan& plan) {
  launch_by_form(causal, plan,
                 {{backward_of_width<64, false>, backward_of_width<64, true>},
                  {backward_of_width<128, false>, backward_of_width<128, true>}});
}

}  // namespace lln::cuda::sm90
