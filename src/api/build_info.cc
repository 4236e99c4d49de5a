// What this build holds. The reasons for parts that are missing come from configuration.
// SPDX-License-Identifier: Apache-2.0
#include "cpu/kernels.h"
#include "cuda/host.h"
#include "lln/version.h"

namespace lln {

BuildInfo build_info() {
  BuildInfo info;
  info.version = LLN_VERSION;
#if defined(__clang__)
  info.compiler = "clang " __VERSION__;
#else
  info.compiler = "gcc " __VERSION__;
#endif
  info.cpu_targets = cpu_target_names();
  info.cpu_target = info.cpu_targets.empty() ? "none" : info.cpu_targets.front();
  const std::string no_cuda = cuda::absence();
  const std::string no_torch = LLN_TORCH_REASON;
  info.parts = {{"cuda", no_cuda.empty(), no_cuda}, {"torch", no_torch.empty(), no_torch}};
  info.cuda = cuda::describe();
  return info;
}

}  // namespace lln
