// The Hopper family: LLN in bf16 with the copy engine and warpgroup products of compute capability
// 9.0.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "api/kernel.h"

namespace lln::cuda {

std::vector<Kernel> sm90_forward_kernels();
std::vector<Kernel> sm90_backward_kernels();

}  // namespace lln::cuda
