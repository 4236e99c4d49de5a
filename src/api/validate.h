// The border: every rule of a call is checked here, once, and all faults are reported together.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "api/kernel.h"
#include "lln/decode.h"

namespace lln {

// What is wrong with a problem whatever its data, one text per fault.
std::vector<std::string> problem_faults(const Problem& problem);

// A call ready for a kernel, together with the sequence table that it points to.
struct CheckedCall {
  Call call;
  std::vector<Sequence> sequences;
};

CheckedCall check_forward(const AttentionInputs& in, const AttentionOutputs& out,
                          const AttentionOptions& options);
CheckedCall check_backward(const AttentionInputs& in, const AttentionGradients& grads,
                           const AttentionOptions& options);

enum class DecodeVerb : std::uint8_t { append, read, step };

// A call of a decode state; memory and tokens of the state are still to be put in.
CheckedCall check_decode(DecodeVerb verb, const DecodeConfig& config, const AttentionInputs& in,
                         const View& o);
// "DecodeState::append" and so on.
const char* call_name(DecodeVerb verb) noexcept;

}  // namespace lln
