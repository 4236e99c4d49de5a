// What the ops of attention share: arguments in the words of the core, and matching.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "lln/attention.h"
#include "lln/moments.h"
#include "ops/tensors.h"

namespace lln_torch {

// `kind` and `feature` in the words of the core: lln, diag64, lln+diag64, softmax; exp, power2.
lln::AttentionOptions attention_options(const std::string& kind, bool causal, double mix,
                                        const std::string& feature);

// `mix` is the share of LLN, or its weight where diag_weight is given.
void set_weights(const OptionalTensor& mix, const OptionalTensor& diag_weight,
                 lln::AttentionInputs& in);

struct Scales {
  Tensor alpha;  // [S, heads]
  Tensor beta;   // [S, heads_k]
};
// Into new tensors; `q` is that of `in`.
Scales match(const lln::MatchingInputs& in, const Tensor& q, const lln::MatchingOptions& options);

}  // namespace lln_torch
