// Gradients of alpha, beta and the weights of LLN+Diag beside kernels that give those of q, k and v
// alone, so that a call that asks for them need not go to the plain kernels as a whole.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/kernel.h"

namespace lln::cuda {

Call without_parameters(const Call& call);
// Whether run_with_parameters() is for a call: it asks for such gradients, and the tiled families
// take the rest.
bool parameters_apart(const Call& call);

// Scratch memory where a call without them needs `rest`: of any call of a problem, or of this one.
std::size_t bytes_with_parameters(const Problem& p, std::size_t rest, int workers);
std::size_t bytes_with_parameters(const Call& call, std::size_t rest, int workers);

// All of a call. `run` is called again with calls that ask for less, down to without_parameters().
void run_with_parameters(const Call& call, void (*run)(const Call&));

}  // namespace lln::cuda
