// Version and what this build holds.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <string_view>
#include <vector>

#define LLN_VERSION "0.1.0"

namespace lln {

struct BuildInfo {
  std::string_view version;  // of the library that is linked, not of the header
  std::string_view compiler;
  std::string cpu_target;  // vector target that kernels use on this machine, e.g. "avx512"
  std::vector<std::string> cpu_targets;  // all that are built in and run here, best first
  struct Part {
    std::string name;  // "cuda", "torch"
    bool built;
    std::string reason;  // why it is not built in
  };
  std::vector<Part> parts;
};

BuildInfo build_info();

}  // namespace lln
