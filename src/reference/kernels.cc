// The entries of the reference in the kernel lists: it takes every problem of its operation whose
// tensors are in host memory.
// SPDX-License-Identifier: Apache-2.0
#include <string>

#include "reference/reference.h"

namespace lln {
namespace {

std::string refusal(const Problem& problem, Op op) {
  if (problem.op != op) {
    return std::string("computes ") + to_string(op) + ", not " + to_string(problem.op);
  }
  if (problem.device.kind != DeviceKind::cpu) {
    return "runs on cpu, the tensors are on " + to_string(problem.device);
  }
  return {};
}

std::string forward_refusal(const Problem& problem) { return refusal(problem, Op::forward); }
std::string backward_refusal(const Problem& problem) { return refusal(problem, Op::backward); }

// Plain loops allocate what they need: speed and memory are not what the reference is for.
std::size_t no_workspace(const Problem&, int) { return 0; }

}  // namespace

Kernel reference_forward_kernel() {
  return {"reference",          forward_refusal, no_workspace, reference::run_forward,
          DeviceKind::cpu,
          /*takes_pieces=*/true};
}

Kernel reference_backward_kernel() {
  return {"reference",          backward_refusal, no_workspace, reference::run_backward,
          DeviceKind::cpu,
          /*takes_pieces=*/true};
}

}  // namespace lln
