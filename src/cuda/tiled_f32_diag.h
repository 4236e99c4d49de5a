// The tiled family of Diag and LLN+Diag in f32.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "api/kernel.h"
#include "cuda/tiled_plan.h"

namespace lln::cuda {

extern const DiagPart kFloatDiagPart;

std::vector<Kernel> tiled_f32_diag_forward_kernels();
std::vector<Kernel> tiled_f32_diag_backward_kernels();

}  // namespace lln::cuda
