// The tiled families of causal attention in f32 (LLN and LLN+Diag) and in f16 (LLN).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "api/kernel.h"

namespace lln::cuda {

struct CausalWork;

std::vector<Kernel> tiled_f32_causal_forward_kernels();
std::vector<Kernel> tiled_f32_causal_backward_kernels();

// LLN in f16.
void launch_f16_causal(const Problem& p, const CausalWork& work);

}  // namespace lln::cuda
