// Gradients of alpha and beta beside kernels that do not give them: dq is alpha dL/d(alpha q), so
// that dalpha is the sum of q dq / alpha over what an alpha is shared by, and dbeta that of k dk.
// Of LLN+Diag the LLN part alone makes such dq and dk, in another call.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/kernel.h"

namespace lln::cuda {

bool wants_scales(const Call& call);
Call without_scales(const Call& call);
// Whether run_with_scales() has them: q dq of a small alpha is out of reach of f16.
bool has_scales(const Problem& p);

// Of run_with_scales(), where the call without these gradients needs `rest`.
std::size_t bytes_with_scales(const Problem& p, std::size_t rest, int workers);
// All of a call: `run` does what is left without these gradients.
void run_with_scales(const Call& call, void (*run)(const Call&));

}  // namespace lln::cuda
