// The padded family: problems whose dim or dim_v is no multiple of 8, on the kernels for tensor
// cores. These read rows in pieces of 16 bytes, so the tensors are copied to rows that are whole
// pieces, with zeros behind their channels, and results are copied back. A family in between, not a
// part of the others: they stay what they were, but for the number of channels that they mask.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "api/kernel.h"

namespace lln::cuda {

std::vector<Kernel> padded_forward_kernels();
std::vector<Kernel> padded_backward_kernels();

}  // namespace lln::cuda
