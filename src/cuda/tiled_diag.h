// The tiled family of Diag and LLN+Diag: tensor-core kernels for 16-bit tensors whose rows are
// whole 16-byte pieces.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "api/kernel.h"
#include "cuda/tiled_plan.h"

namespace lln::cuda {

extern const DiagPart kTiledDiagPart;

std::vector<Kernel> tiled_diag_forward_kernels();
std::vector<Kernel> tiled_diag_backward_kernels();

}  // namespace lln::cuda
