// A piece of a forward pass that is computed again in the backward pass instead of being stored:
// the price of one more evaluation for memory that does not grow with what the piece makes inside.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <functional>
#include <vector>

namespace lln_torch {

// piece(inputs), a function of the inputs alone: tensors that need gradients must be among them.
// Autocast does not reach into it, so that both evaluations are the same.
at::Tensor recomputed(const std::function<at::Tensor(const std::vector<at::Tensor>&)>& piece,
                      const std::vector<at::Tensor>& inputs);

}  // namespace lln_torch
