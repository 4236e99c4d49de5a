// The two calls: validate, choose a kernel, find scratch memory, run.
// SPDX-License-Identifier: Apache-2.0
#include "lln/attention.h"

#include <fmt/format.h>

#include <memory>
#include <new>

#include "api/dispatch.h"
#include "api/memory_errors.h"
#include "api/validate.h"
#include "lln/error.h"

namespace lln {
namespace {

struct AlignedDelete {
  void operator()(std::byte* p) const noexcept { ::operator delete[](p, std::align_val_t{64}); }
};

void run(CheckedCall& checked, const Exec& exec) {
  Call& call = checked.call;
  call.sequences = checked.sequences;
  const Kernel& kernel = choose_kernel(call.problem, exec.kernel);
  const std::size_t needed = kernel.workspace_bytes(call.problem, worker_count(exec.parallel));
  std::unique_ptr<std::byte[], AlignedDelete> owned;
  if (!exec.workspace.empty()) {
    if (exec.workspace.size() < needed) {
      throw Error(
          ErrorCode::invalid_argument,
          fmt::format("attention_{}: workspace of {} bytes is too small for {}: {} needs {} "
                      "bytes with {} worker(s)",
                      to_string(call.problem.op), exec.workspace.size(), to_string(call.problem),
                      kernel.name, needed, worker_count(exec.parallel)));
    }
    call.workspace = exec.workspace.data();
  } else if (needed > 0) {
    owned.reset(new (std::align_val_t{64}, std::nothrow) std::byte[needed]);
    if (owned == nullptr) {
      throw Error(
          ErrorCode::out_of_memory,
          fmt::format("attention_{}: no memory for the workspace of {} bytes of {} for {}",
                      to_string(call.problem.op), needed, kernel.name, to_string(call.problem)));
    }
    call.workspace = owned.get();
  }
  call.parallel = exec.parallel;
  call.stream = exec.stream;
  kernel.run(call);
}

}  // namespace

void attention_forward(const AttentionInputs& in, const AttentionOutputs& out,
                       const AttentionOptions& options, const Exec& exec) {
  memory_errors("attention_forward", [&] {
    CheckedCall checked = check_forward(in, out, options);
    run(checked, exec);
  });
}

void attention_backward(const AttentionInputs& in, const AttentionGradients& grads,
                        const AttentionOptions& options, const Exec& exec) {
  memory_errors("attention_backward", [&] {
    CheckedCall checked = check_backward(in, grads, options);
    run(checked, exec);
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
