// The instruments: what `lln analyze --json` says of a layer, as the bytes of that JSON.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "lln_torch/binding/tensors.h"

namespace lln_torch::binding {

// Tensors in host memory. `kinds` has commas between; a layer below 0 is none.
Tensor analyze(const Tensor& q, const Tensor& k, const OptionalTensor& alpha,
               const OptionalTensor& beta, const std::string& kinds, const std::string& matching,
               bool causal, std::int64_t rows, std::int64_t layer, const std::string& name);

}  // namespace lln_torch::binding
