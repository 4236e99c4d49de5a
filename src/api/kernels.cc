// The ordered kernel lists. Adding a kernel is one entry here; tests, explain, `lln check` and
// benchmarks pick it up.
// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "api/kernel.h"
#include "cpu/kernels.h"
#include "reference/reference.h"

namespace lln {

std::span<const Kernel> kernels(Op op) {
  static const std::vector<Kernel> forward = [] {
    std::vector<Kernel> list = cpu_forward_kernels();
    list.push_back(reference_forward_kernel());
    return list;
  }();
  static const std::vector<Kernel> backward = [] {
    std::vector<Kernel> list = cpu_backward_kernels();
    list.push_back(reference_backward_kernel());
    return list;
  }();
  static const std::vector<Kernel> append = cpu_append_kernels();
  static const std::vector<Kernel> step = cpu_step_kernels();
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
