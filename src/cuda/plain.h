// The plain kernels: simple ones that take every problem on a device except softmax and f64. They
// stand below all others in the lists.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "api/kernel.h"

namespace lln::cuda {

std::vector<Kernel> plain_forward_kernels();
std::vector<Kernel> plain_backward_kernels();

}  // namespace lln::cuda
