// The plain kernels: simple ones that take every problem on a device except softmax and f64. They
// stand below all others in the lists.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "api/kernel.h"

namespace lln::cuda {

std::vector<Kernel> plain_forward_kernels();
std::vector<Kernel> plain_backward_kernels();

// Computes a call, forward or backward, for some heads alone. `flags` is device memory that earlier
// work on the stream has written: [0] whether there are any, [1 + sequence * heads_k + head] which.
void run_plain_heads(const Call& call, const std::uint32_t* flags);

}  // namespace lln::cuda
