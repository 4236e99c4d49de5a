// A build without CUDA, or whose torch has no NCCL.
// SPDX-License-Identifier: Apache-2.0
#include "lln/error.h"
#include "lln_torch/parallel/backend.h"

namespace lln_torch {

Backend make_nccl(const Store&, int, int, std::chrono::milliseconds) {
  throw lln::Error(lln::ErrorCode::unsupported,
                   "several ranks on CUDA devices need NCCL, which this build does not have: build "
                   "with LLN_CUDA=ON, a torch for CUDA and nccl.h");
}

}  // namespace lln_torch
