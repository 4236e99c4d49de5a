// The tiled family of causal attention for heads of 129 to 256 channels in bf16.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "api/kernel.h"

namespace lln::cuda {

std::vector<Kernel> tiled_wide_causal_forward_kernels();
std::vector<Kernel> tiled_wide_causal_backward_kernels();

}  // namespace lln::cuda
