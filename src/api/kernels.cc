// The ordered kernel lists. Adding a kernel is one entry here; tests, explain, `lln check` and
// benchmarks pick it up.
// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "api/kernel.h"
#include "cpu/kernels.h"
#include "cuda/kernels.h"
#include "reference/reference.h"

namespace lln {

namespace {

// What is on a device comes first: nothing else takes it, and it takes nothing else.
std::vector<Kernel> joined(std::vector<Kernel> cuda, const std::vector<Kernel>& cpu) {
  for (Kernel& kernel : cuda) kernel.device = DeviceKind::cuda;
  cuda.insert(cuda.end(), cpu.begin(), cpu.end());
  return cuda;
}

}  // namespace

std::span<const Kernel> kernels(Op op) {
  static const std::vector<Kernel> forward = [] {
    std::vector<Kernel> list = joined(cuda_forward_kernels(), cpu_forward_kernels());
    list.push_back(reference_forward_kernel());
    return list;
  }();
  static const std::vector<Kernel> backward = [] {
    std::vector<Kernel> list = joined(cuda_backward_kernels(), cpu_backward_kernels());
    list.push_back(reference_backward_kernel());
    return list;
  }();
  static const std::vector<Kernel> append = joined(cuda_append_kernels(), cpu_append_kernels());
  static const std::vector<Kernel> step = joined(cuda_step_kernels(), cpu_step_kernels());
  switch (op) {
    case Op::forward:
      return forward;
    case Op::backward:
      return backward;
    case Op::append:
      return append;
    case Op::step:
      return step;
    case Op::train:
      break;
  }
  return {};
}

}  // namespace lln
