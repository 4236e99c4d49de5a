// The tiled family of Diag and LLN+Diag in f32.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "api/kernel.h"
#include "cuda/tiled_plan.h"

namespace lln::cuda {

// Diag beside an LLN part of another family, whose results it is added to: why it takes no such
// problem, its scratch memory, the call with that at its workspace, and the launch.
std::string float_diag_refusal(const Problem& p);
std::size_t float_diag_bytes(const Problem& p);
TiledWork prepare_float_diag(const Call& call);
void launch_float_diag(Op op, const TiledWork& work);

std::vector<Kernel> tiled_f32_diag_forward_kernels();
std::vector<Kernel> tiled_f32_diag_backward_kernels();

}  // namespace lln::cuda
