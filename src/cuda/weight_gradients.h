// Gradients of the weights of LLN+Diag beside kernels that do not give them: o is w1 x + w2 y, so
// that dw1 is the sum of g x and dw2 that of g y over what a weight is shared by. x and y are made
// again, one after the other, by the forward pass of LLN and of Diag alone, each on the kernel that
// takes it. The backward pass itself then needs no plain kernels.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/kernel.h"

namespace lln::cuda {

bool wants_weights(const Call& call);
// The same call without the gradients of weights.
Call without_weights(const Call& call);

// Of run_with_weights(), where without_weights() needs `rest`.
std::size_t bytes_with_weights(const Problem& p, std::size_t rest, int workers);
// All of a call: `run` does what without_weights() leaves.
void run_with_weights(const Call& call, void (*run)(const Call&));

}  // namespace lln::cuda
