// What forward, backward and matching share: the arguments of an attention call as the core's.
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

struct Scales {
  Tensor alpha;  // [S, heads]
  Tensor beta;   // [S, heads_k]
};
// alpha and beta by a mode that needs nothing but q and k.
Scales match(const lln::MatchingInputs& in, const Tensor& q, const std::string& mode, bool causal,
             lln::Feature feature);

}  // namespace lln_torch
