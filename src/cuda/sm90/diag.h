// The Hopper family of LLN+Diag in bf16.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "api/kernel.h"

namespace lln::cuda {

std::vector<Kernel> sm90_diag_forward_kernels();
std::vector<Kernel> sm90_diag_backward_kernels();

}  // namespace lln::cuda
