// The tiled forward pass of LLN in f32.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "api/kernel.h"

namespace lln::cuda {

std::vector<Kernel> tiled_f32_forward_kernels();

}  // namespace lln::cuda
