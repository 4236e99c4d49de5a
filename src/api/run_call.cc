// What every call does once it is checked: choose a kernel, find scratch memory, run.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <memory>
#include <new>

#include "api/dispatch.h"
#include "lln/error.h"

namespace lln {
namespace {

struct AlignedDelete {
  void operator()(std::byte* p) const noexcept { ::operator delete[](p, std::align_val_t{64}); }
};

}  // namespace

void run_call(const char* name, CheckedCall& checked, const Exec& exec) {
  Call& call = checked.call;
  call.sequences = checked.sequences;
  const Kernel& kernel = choose_kernel(call.problem, exec.kernel);
  const std::size_t needed = kernel.workspace_bytes(call.problem, worker_count(exec.parallel));
  std::unique_ptr<std::byte[], AlignedDelete> owned;
  if (!exec.workspace.empty()) {
    if (exec.workspace.size() < needed) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("{}: workspace of {} bytes is too small for {}: {} needs {} bytes "
                              "with {} worker(s)",
                              name, exec.workspace.size(), to_string(call.problem), kernel.name,
                              needed, worker_count(exec.parallel)));
    }
    call.workspace = exec.workspace.data();
  } else if (needed > 0) {
    owned.reset(new (std::align_val_t{64}, std::nothrow) std::byte[needed]);
    if (owned == nullptr) {
      throw Error(ErrorCode::out_of_memory,
                  fmt::format("{}: no memory for the workspace of {} bytes of {} for {}", name,
                              needed, kernel.name, to_string(call.problem)));
    }
    call.workspace = owned.get();
  }
  call.parallel = exec.parallel;
  call.stream = exec.stream;
  kernel.run(call);
}

}  // namespace lln
