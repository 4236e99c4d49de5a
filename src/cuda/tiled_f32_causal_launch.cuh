// The launches of causal LLN in f32 and f16: the walks, and where sequences have several pieces the
// sums that these begin with.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/launch.h"
#include "cuda/tiled_causal_plan.h"
#include "cuda/tiled_f32_causal_forward.cuh"
#include "cuda/tiled_f32_causal_keys.cuh"
#include "cuda/tiled_f32_causal_rows.cuh"
#include "cuda/tiled_plan.h"

namespace lln::cuda {

// s and K before every piece.
template <class T, int kDim>
void launch_float_before(const CausalCall& causal, const CausalPlan& plan) {
  launch("float_causal_key_sums", float_causal_key_sums<T, kDim>,
         LaunchShape{plan.jobs * causal.call.heads_k, 2 * kDim, kFloatCausalSumsShared<T, kDim>,
                     plan.stream},
         causal);
  launch_join_before(causal, plan);
}

template <class T, int kDim>
void launch_causal_forward_of_width(const CausalCall& causal, const CausalPlan& plan) {
  if (plan.pieces) launch_float_before<T, kDim>(causal, plan);
  launch("float_causal_forward", float_causal_forward<T, kDim>,
         LaunchShape{plan.jobs * causal.call.heads, 2 * kDim,
                     FloatCausalForwardShape<T, kDim>::kShared, plan.stream},
         causal);
}

template <class T, int kDim>
void launch_causal_backward_of_width(const CausalCall& causal, const CausalPlan& plan) {
  const DeviceCall& call = causal.call;
  if (plan.pieces) launch_float_before<T, kDim>(causal, plan);
  launch("float_causal_rows", float_causal_rows<T, kDim>,
         LaunchShape{plan.jobs * call.heads, 2 * kDim, FloatCausalRowsShape<T, kDim>::kShared,
                     plan.stream},
         causal);
  if (plan.pieces) {
    launch(
        "float_causal_row_sums", float_causal_row_sums<T, kDim>,
        LaunchShape{plan.jobs * call.heads, 2 * kDim, kFloatCausalSumsShared<T, kDim>, plan.stream},
        causal);
    launch_join_behind(causal, plan);
  }
  launch("float_causal_keys", float_causal_keys<T, kDim>,
         LaunchShape{plan.jobs * call.heads_k, 2 * kDim, FloatCausalKeysShape<T, kDim>::kShared,
                     plan.stream},
         causal);
}

template <class T, int kDim>
void launch_causal_of_width(Op op, const CausalWork& work) {
  (op == Op::backward ? launch_causal_backward_of_width<T, kDim>
                      : launch_causal_forward_of_width<T, kDim>)(work.causal, work.plan);
}

template <class T>
void launch_float_causal(const Problem& p, const CausalWork& work) {
  switch (tiled_width(p)) {
    case 32:
      return launch_causal_of_width<T, 32>(p.op, work);
    case 64:
      return launch_causal_of_width<T, 64>(p.op, work);
    default:
      return launch_causal_of_width<T, 128>(p.op, work);
  }
}

}  // namespace lln::cuda
