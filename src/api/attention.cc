// The two calls: validate and run.
// SPDX-License-Identifier: Apache-2.0
#include "lln/attention.h"

#include "api/dispatch.h"
#include "api/memory_errors.h"
#include "api/validate.h"

namespace lln {
void attention_forward(const AttentionInputs& in, const AttentionOutputs& out,
                       const AttentionOptions& options, const Exec& exec) {
  memory_errors("attention_forward", [&] {
    CheckedCall checked = check_forward(in, out, options);
    run_call("attention_forward", checked, exec);
  });
}

void attention_backward(const AttentionInputs& in, const AttentionGradients& grads,
                        const AttentionOptions& options, const Exec& exec) {
  memory_errors("attention_backward", [&] {
    CheckedCall checked = check_backward(in, grads, options);
    run_call("attention_backward", checked, exec);
  });
}

Problem make_problem(const AttentionInputs& in, const AttentionOutputs& out,
                     const AttentionOptions& options) {
  return memory_errors("make_problem",
                       [&] { return check_forward(in, out, options).call.problem; });
}

Problem make_problem(const AttentionInputs& in, const AttentionGradients& grads,
                     const AttentionOptions& options) {
  return memory_errors("make_problem",
                       [&] { return check_backward(in, grads, options).call.problem; });
}

}  // namespace lln
