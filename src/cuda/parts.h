// LLN+Diag as two calls, LLN and Diag, each on the first kernel that takes it, and their sum: for
// what no family takes as a whole although one takes its LLN part.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "api/kernel.h"

namespace lln::cuda {

// Also for calls whose weights a family does not hold, though the problem does not show it.
std::size_t parts_bytes(const Problem& p, int workers);
std::size_t parts_call_bytes(const Call& call, int workers);
void run_parts(const Call& call);

std::vector<Kernel> parts_forward_kernels();
std::vector<Kernel> parts_backward_kernels();

}  // namespace lln::cuda
