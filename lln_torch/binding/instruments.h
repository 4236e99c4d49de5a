// The instruments: what `lln analyze --json` says of a layer, as the text of that JSON.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "lln_torch/binding/tensors.h"

namespace lln_torch::binding {

struct AnalysisWords {
  std::vector<std::string> kinds = {};
  std::string matching = {};
  bool causal = false;
  std::int64_t rows = 0;  // 0: all
  std::optional<std::int64_t> layer = {};
  std::string name = {};
  bool brief = false;
};
// Tensors in host memory.
std::string analyze(const Tensor& q, const Tensor& k, const OptionalTensor& alpha,
                    const OptionalTensor& beta, const AnalysisWords& words);

}  // namespace lln_torch::binding
