// LLN+Diag as two calls, LLN and Diag, each on the first kernel that takes it. Other families make
// one of the calls beside their own work; the family here is both of them and their sum: for what
// no family takes as a whole although one takes a part of it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "cuda/device_call.h"

namespace lln::cuda {

Problem part_of(Problem p, Kind kind);
// The same inputs but for the weights, without results and gradients.
Call part_of(const Call& call, Kind kind);
// Scratch memory of any call of a part, and the call itself, whose workspace has it.
std::size_t part_bytes(const Problem& part, int workers);
void run_part(const Call& part);

// Scratch memory in the shape of a tensor, one row after the other, and how many bytes that takes.
View scratch_like(const ConstView& tensor, std::byte* data);
std::size_t scratch_bytes(const Problem& p, std::int64_t heads, std::int64_t tokens,
                          std::int64_t channels);
// The same of g, dq, dk and dv, for the gradients of one part.
std::size_t part_gradient_bytes(const Problem& p);
AttentionGradients part_gradients(const Call& call, std::byte* data);
// g of the call times the weight of a part.
void weigh_gradient(const Call& call, const Weight& weight, const ConstView& to);

std::size_t parts_bytes(const Problem& p, int workers);
void run_parts(const Call& call);

std::vector<Kernel> parts_forward_kernels();
std::vector<Kernel> parts_backward_kernels();

}  // namespace lln::cuda
