// The CUDA entries of the kernel lists, empty where the library was built without CUDA.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "api/kernel.h"

namespace lln {

std::vector<Kernel> cuda_forward_kernels();
std::vector<Kernel> cuda_backward_kernels();
std::vector<Kernel> cuda_append_kernels();
std::vector<Kernel> cuda_step_kernels();

}  // namespace lln
