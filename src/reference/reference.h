// The reference kernels: the definitions as plain f64 loops in log space, quadratic in the sequence
// length. Last entry of every kernel list, and the truth that all other kernels are tested against.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/kernel.h"

namespace lln {

Kernel reference_forward_kernel();
Kernel reference_backward_kernel();

namespace reference {

void run_forward(const Call& call);
void run_backward(const Call& call);

}  // namespace reference
}  // namespace lln
