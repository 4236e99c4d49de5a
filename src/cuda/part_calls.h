// One part of LLN+Diag as a call of its own, on the first kernel that takes it: what gradients of
// parameters and LLN+Diag in two calls are made of.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/device_call.h"

namespace lln::cuda {

Problem part_of(Problem p, Kind kind);
// The same inputs but for the weights, without results and gradients.
Call part_of(const Call& call, Kind kind);
// The kernel of a part; null where none takes it.
const Kernel* part_kernel(const Problem& part);
// What any call of a part needs for its workspace.
std::size_t part_bytes(const Problem& part, int workers);
void run_part(const Call& part);

// Scratch memory in the shape of a tensor, one row after the other, and how many bytes that takes.
View scratch_like(const ConstView& tensor, std::byte* data);
std::size_t scratch_bytes(const Problem& p, std::int64_t heads, std::int64_t tokens,
                          std::int64_t channels);
// The same of g, dq, dk and dv, for the gradients of one part.
std::size_t part_gradient_bytes(const Problem& p);
AttentionGradients part_gradients(const Call& call, std::byte* data);
// The g of part_gradients(): that of the call times the weight of a part.
void weigh_gradient(const Call& call, const Weight& weight, std::byte* data);

}  // namespace lln::cuda
