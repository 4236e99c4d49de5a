// The tiled family of causal LLN and LLN+Diag in f32.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "api/kernel.h"

namespace lln::cuda {

std::vector<Kernel> tiled_f32_causal_forward_kernels();
std::vector<Kernel> tiled_f32_causal_backward_kernels();

}  // namespace lln::cuda
