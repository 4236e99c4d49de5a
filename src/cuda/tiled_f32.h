// The tiled family of LLN in f32.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "api/kernel.h"
#include "cuda/tiled_plan.h"

namespace lln::cuda {

// All of LLN, or the LLN part of LLN+Diag with its weight.
void launch_float_lln(Op op, const TiledWork& work);

std::vector<Kernel> tiled_f32_forward_kernels();
std::vector<Kernel> tiled_f32_backward_kernels();

}  // namespace lln::cuda
