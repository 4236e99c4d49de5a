// Launching kernels: more than 48 KB of shared memory where asked for, and launches whose blocks
// may start before the last ones of the previous kernel have ended (instructions.cuh:
// wait_for_previous).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <string>
#include <utility>

#include "cuda/device.h"
#include "lln/error.h"

namespace lln::cuda {

inline std::int64_t blocks_for(std::int64_t items, std::int64_t per_block) {
  return (items + per_block - 1) / per_block;
}

struct LaunchShape {
  std::int64_t blocks = 0;
  int threads = 0;
  int shared = 0;
  cudaStream_t stream = nullptr;
  // The kernel may start before the last blocks of the previous one have ended. The first kernel of
  // a call then calls wait_for_previous() before it reads or writes anything, later ones before
  // they read what the previous one wrote, which called let_next_start() after waiting itself.
  bool overlapping = false;
  // The most that any launch of the kernel asks for, where they ask for more or less: other threads
  // may be launching it, too. 0: all ask for `shared`.
  int most_shared = 0;
};

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
  constexpr int kWithoutAsking = 48 * 1024;
  if (shape.shared > kWithoutAsking) {
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               std::max(shape.shared, shape.most_shared)),
          name);
  }
  cudaLaunchAttribute overlap;
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(shape.blocks));
  config.blockDim = dim3(static_cast<unsigned>(shape.threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shape.shared);
  config.stream = shape.stream;
  config.attrs = &overlap;
  if (shape.overlapping) {
    int device = 0;
    check(cudaGetDevice(&device), "cudaGetDevice");
    config.numAttrs = can_overlap(device) ? 1 : 0;
  }
  check(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...), name);
}

}  // namespace lln::cuda
