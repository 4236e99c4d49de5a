// How the Hopper kernels are launched: one block a multiprocessor at most, with all the shared
// memory that its shape asks for. Kernels start early (launch.h): those that may be the first of a
// call (key_sums, short_forward, rows_backward, diag_row_sums) wait before they touch anything; the
// others read the tensors of the call before they wait, and always have one of these before them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/sm90/tensor_map.h"
#include "cuda/tiled_launch.h"

namespace lln::cuda::sm90 {

template <class Shape, class... Parameters, class... Arguments>
void launch_blocks(const char* name, void (*kernel)(Parameters...), std::int64_t items,
                   int multiprocessors, cudaStream_t stream, const Arguments&... arguments) {
  launch(name, kernel,
         LaunchShape{std::min<std::int64_t>(items, multiprocessors), Shape::kThreads,
                     static_cast<int>(sizeof(typename Shape::Shared)), stream, true},
         arguments...);
}

// (c, C) of all sequences.
void launch_state(const TiledCall& tiled, const TiledPlan& plan, const TensorMaps& maps,
                  int multiprocessors);

}  // namespace lln::cuda::sm90
