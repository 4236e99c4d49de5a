// Launching kernels: more than 48 KB of shared memory where asked for, and launches whose blocks
// may start before the last ones of the previous kernel have ended (mma.cuh: wait_for_previous).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <utility>

#include "cuda/device.h"
#include "lln/error.h"

namespace lln::cuda {

struct LaunchShape {
  std::int64_t blocks = 0;
  int threads = 0;
  int shared = 0;
  cudaStream_t stream = nullptr;
  // The kernel calls wait_for_previous() before it reads what the previous one wrote, and the
  // previous one is a kernel of the same call that called let_next_start() after waiting itself.
  bool overlapping = false;
  int cluster = 1;  // blocks that run at the same time and reach each other's shared memory
};

// The attributes of a launch, which must outlive it.
class LaunchConfig {
 public:
  explicit LaunchConfig(const LaunchShape& shape) {
    config_.gridDim = dim3(static_cast<unsigned>(shape.blocks));
    config_.blockDim = dim3(static_cast<unsigned>(shape.threads));
    config_.dynamicSmemBytes = static_cast<std::size_t>(shape.shared);
    config_.stream = shape.stream;
    config_.attrs = attributes_;
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    if (shape.overlapping && can_overlap(device)) {
      cudaLaunchAttribute& overlap = attributes_[config_.numAttrs++];
      overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
      overlap.val.programmaticStreamSerializationAllowed = 1;
    }
    if (shape.cluster > 1) {
      cudaLaunchAttribute& cluster = attributes_[config_.numAttrs++];
      cluster.id = cudaLaunchAttributeClusterDimension;
      cluster.val.clusterDim = {static_cast<unsigned>(shape.cluster), 1, 1};
    }
  }
  LaunchConfig(const LaunchConfig&) = delete;
  LaunchConfig& operator=(const LaunchConfig&) = delete;
  const cudaLaunchConfig_t& get() const { return config_; }

 private:
  cudaLaunchAttribute attributes_[2];
  cudaLaunchConfig_t config_{};
};

template <class... Parameters>
void allow_shared(const char* name, void (*kernel)(Parameters...), const LaunchShape& shape) {
  if (shape.shared <= 48 * 1024) return;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shape.shared),
        name);
}

// How many clusters of the kernel the current device holds at once.
template <class... Parameters>
int resident_clusters(const char* name, void (*kernel)(Parameters...), const LaunchShape& shape) {
  allow_shared(name, kernel, shape);
  int clusters = 0;
  check(cudaOccupancyMaxActiveClusters(&clusters, kernel, &LaunchConfig(shape).get()), name);
  return clusters;
}

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), const LaunchShape& shape,
            Arguments&&... arguments) {
  if (shape.blocks == 0) return;
  constexpr std::int64_t kMostBlocks = 0x7FFFFFFF;
  if (shape.blocks > kMostBlocks) {
    throw Error(ErrorCode::unsupported, std::string(name) + ": " + std::to_string(shape.blocks) +
                                            " blocks, a grid has at most " +
                                            std::to_string(kMostBlocks));
  }
  allow_shared(name, kernel, shape);
  const LaunchConfig config(shape);
  check(cudaLaunchKernelEx(&config.get(), kernel, std::forward<Arguments>(arguments)...), name);
}

}  // namespace lln::cuda
