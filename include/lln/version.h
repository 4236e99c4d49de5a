// Version and what this build holds.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
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
  // Where CUDA is built in.
  struct CudaDevice {
    std::string name;
    int compute_capability;  // 90 for 9.0
    int multiprocessors;
    std::size_t memory_bytes;
    std::string refusal;  // why kernels of this build do not run on it; empty when they do
  };
  struct Cuda {
    std::string toolkit;        // version that it was built with, e.g. "13.0.88"
    std::string architectures;  // that there is code for, as CMake names them
    std::string driver;         // newest CUDA that the driver knows; empty: no driver
    std::vector<CudaDevice> devices;
    std::string no_devices;  // why there are none
  };
  Cuda cuda;
};

BuildInfo build_info();

}  // namespace lln
