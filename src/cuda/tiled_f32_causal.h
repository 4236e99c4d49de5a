// The tiled families of causal attention in f32 and f16.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "api/kernel.h"

namespace lln::cuda {

struct CausalWork;

std::vector<Kernel> tiled_f32_causal_forward_kernels();
std::vector<Kernel> tiled_f32_causal_backward_kernels();

// The LLN part in f16.
void launch_f16_causal(const Problem& p, const CausalWork& work);

}  // namespace lln::cuda
