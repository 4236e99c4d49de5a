// The two calls: validate and run.
// SPDX-License-Identifier: Apache-2.0
#include "lln/attention.h"

#include "api/dispatch.h"
#include "api/memory_errors.h"
#include "api/validate.h"

namespace lln {
namespace {

std::size_t bytes_of_call(const CheckedCall& checked, const Exec& exec) {
  const Kernel& kernel = choose_kernel(checked.call.problem, exec.kernel);
  return kernel.bytes_of_call(checked.call, worker_count(exec.parallel));
}

}  // namespace

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

std::size_t workspace_bytes(const AttentionInputs& in, const AttentionOutputs& out,
                            const AttentionOptions& options, const Exec& exec) {
  return memory_errors("workspace_bytes",
                       [&] { return bytes_of_call(check_forward(in, out, options), exec); });
}

std::size_t workspace_bytes(const AttentionInputs& in, const AttentionGradients& grads,
                            const AttentionOptions& options, const Exec& exec) {
  return memory_errors("workspace_bytes",
                       [&] { return bytes_of_call(check_backward(in, grads, options), exec); });
}

}  // namespace lln
