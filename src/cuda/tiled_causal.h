// The tiled family of causal attention: tensor-core kernels that walk a sequence in chunks with the
// state of all earlier keys on chip.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "api/kernel.h"

namespace lln::cuda {

std::vector<Kernel> tiled_causal_forward_kernels();
std::vector<Kernel> tiled_causal_backward_kernels();

}  // namespace lln::cuda
