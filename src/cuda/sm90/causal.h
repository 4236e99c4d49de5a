// The causal walks written for compute capability 9.0.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_causal_call.h"

namespace lln::cuda::sm90 {

void launch_causal_forward(const CausalCall& causal, const CausalPlan& plan);
void launch_causal_backward(const CausalCall& causal, const CausalPlan& plan);

}  // namespace lln::cuda::sm90
