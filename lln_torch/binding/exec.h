// How calls of the core run inside torch: on torch's own threads, in the current CUDA stream, with
// scratch memory from torch's allocator.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>

#include "lln/exec.h"
#include "lln_torch/binding/tensors.h"

namespace lln_torch::binding {

// Threads and stream for a call on tensors where `x` is that reads and writes about `elements`
// numbers: a small call stays on the calling thread, which no result depends on.
lln::Exec exec_for(const Tensor& x, std::int64_t elements);

// Scratch memory of a call on a device: it belongs to the stream, is captured in graphs, and can be
// freed as soon as the call has returned. On the CPU the core allocates its own.
class Workspace {
 public:
  // Sets exec.workspace; `bytes` is asked on a device only.
  template <class Bytes>
  Workspace(const Tensor& x, lln::Exec& exec, Bytes&& bytes) {
    if (!x.is_cpu()) allocate(x, exec, bytes());
  }

 private:
  void allocate(const Tensor& x, lln::Exec& exec, std::size_t bytes);
  OptionalTensor memory_;
};

}  // namespace lln_torch::binding
