// What every call does once it is checked: choose a kernel, find scratch memory, run.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <memory>
#include <new>
#include <optional>

#include "api/dispatch.h"
#include "cuda/host.h"
#include "lln/error.h"

namespace lln {
namespace {

struct AlignedDelete {
  void operator()(std::byte* p) const noexcept { ::operator delete[](p, std::align_val_t{64}); }
};

// Of a workspace on a device, so that kernels can lay it out; every allocation of CUDA has it.
constexpr std::uintptr_t kDeviceAlignment = 256;

// Throws where the workspace that is given does not do.
void check_workspace(const char* name, const Problem& problem, const Kernel& kernel,
                     std::size_t needed, const Exec& exec) {
  if (exec.workspace.size() < needed) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}: workspace of {} bytes is too small for {}: {} needs {} bytes "
                            "with {} worker(s)",
                            name, exec.workspace.size(), to_string(problem), kernel.name, needed,
                            worker_count(exec.parallel)));
  }
  const auto off = reinterpret_cast<std::uintptr_t>(exec.workspace.data()) % kDeviceAlignment;
  if (problem.device.kind == DeviceKind::cuda && off != 0) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}: workspace for {} starts {} bytes past a multiple of {}", name,
                            to_string(problem), off, kDeviceAlignment));
  }
}

[[noreturn]] void throw_no_memory(const char* name, const Problem& problem, const Kernel& kernel,
                                  std::size_t needed) {
  throw Error(ErrorCode::out_of_memory,
              fmt::format("{}: no memory for the workspace of {} bytes of {} for {}", name, needed,
                          kernel.name, to_string(problem)));
}

void run_on_host(const char* name, Call& call, const Kernel& kernel, std::size_t needed) {
  std::unique_ptr<std::byte[], AlignedDelete> owned;
  if (call.workspace == nullptr && needed > 0) {
    owned.reset(new (std::align_val_t{64}, std::nothrow) std::byte[needed]);
    if (owned == nullptr) throw_no_memory(name, call.problem, kernel, needed);
    call.workspace = owned.get();
  }
  kernel.run(call);
}

// In the order of the stream: neither the memory nor the kernel is waited for.
void run_on_device(const char* name, Call& call, const Kernel& kernel, std::size_t needed) {
  const cuda::CurrentDevice current(call.problem.device.index);
  cuda::throw_reported_faults(call.problem.device.index);
  std::optional<cuda::Scratch> owned;
  if (call.workspace == nullptr && needed > 0) {
    owned.emplace(needed, call.stream);
    if (owned->data() == nullptr) throw_no_memory(name, call.problem, kernel, needed);
    call.workspace = owned->data();
  }
  kernel.run(call);
}

}  // namespace

void run_call(const char* name, CheckedCall& checked, const Exec& exec) {
  Call& call = checked.call;
  call.sequences = checked.sequences;
  call.parallel = exec.parallel;
  call.stream = exec.stream;
  const Kernel& kernel = choose_kernel(call.problem, exec.kernel);
  const std::size_t needed = kernel.bytes_of_call(call, worker_count(exec.parallel));
  if (!exec.workspace.empty()) {
    check_workspace(name, call.problem, kernel, needed, exec);
    call.workspace = exec.workspace.data();
  }
  if (kernel.device == DeviceKind::cuda) {
    run_on_device(name, call, kernel, needed);
  } else {
    run_on_host(name, call, kernel, needed);
  }
}

}  // namespace lln
