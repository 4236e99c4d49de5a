// How a call becomes launches: passes in order on one stream, each checked.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/launch.h"
#include "cuda/tiled_keys.cuh"
#include "cuda/tiled_keys_backward.cuh"
#include "cuda/tiled_launch.h"
#include "cuda/tiled_rows.cuh"
#include "cuda/tiled_rows_backward.cuh"
#include "cuda/tiled_wide_keys.cuh"
#include "cuda/tiled_wide_rows.cuh"

namespace lln::cuda {

template <class... Parameters, class... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), std::int64_t blocks, int threads,
            int shared, cudaStream_t stream, Arguments&&... arguments) {
  launch(name, kernel, LaunchShape{blocks, threads, shared, stream},
         std::forward<Arguments>(arguments)...);
}

// (c, C) of all sequences.
template <class T, int kDim>
void launch_state(const TiledCall& tiled, const TiledPlan& plan) {
  constexpr int kWidth = kDim < 128 ? kDim : 128;
  constexpr int kStages = 3;
  const DeviceCall& call = tiled.call;
  const std::int64_t splits = (call.dim_v + kWidth - 1) / kWidth;
  if (plan.has_keys) {
    launch("key_sums", key_sums<T, kDim, kWidth, kStages>, plan.key_jobs * call.heads_k * splits,
           2 * kDim, kStages * kTileTokens * (kDim + kWidth) * 2, plan.stream, tiled, plan.whole);
    if (!plan.whole) launch_join_keys(tiled, plan.stream);
  }
  launch_given_state(tiled, plan);
}

template <class T, int kDim>
void launch_forward(const TiledCall& tiled, const TiledPlan& plan) {
  const DeviceCall& call = tiled.call;
  launch_state<T, kDim>(tiled, plan);
  if (!plan.has_rows) return;
  launch(
      "rows_forward", rows_forward<T, kDim>,
      LaunchShape{plan.row_jobs * call.heads, kRowsThreads, kRowsShared<kDim>, plan.stream, true},
      tiled);
}

// dq, and the sums of rows.
template <class T, int kDim>
void launch_rows_backward(const TiledCall& tiled, const TiledPlan& plan) {
  const std::int64_t blocks = plan.row_jobs * tiled.call.heads;
  // The first kernel of a call waits for what came before it in the ordinary way.
  const bool overlapping = !plan.state_given;
  if constexpr (kDim == kWideDim) {
    launch("wide_rows_backward", wide_rows_backward<T>,
           LaunchShape{blocks * wide_splits(tiled.call.dim_v), kWideThreads, sizeof(WideRowsShared),
                       plan.stream, overlapping},
           tiled);
  } else {
    using Shape = RowsBackwardShape<kDim>;
    launch("rows_backward", rows_backward<T, kDim>,
           LaunchShape{blocks, Shape::kThreads, Shape::kShared, plan.stream, overlapping}, tiled);
  }
}

// dk and dv.
template <class T, int kDim>
void launch_keys_backward(const TiledCall& tiled, const TiledPlan& plan) {
  const std::int64_t blocks = plan.key_rows_jobs * tiled.call.heads_k;
  if constexpr (kDim == kWideDim) {
    launch("wide_keys_backward", wide_keys_backward<T>,
           LaunchShape{blocks, kWideThreads, sizeof(WideKeysShared), plan.stream, true}, tiled);
  } else {
    launch("keys_backward", keys_backward<T, kDim>,
           LaunchShape{blocks, kKeysBackwardThreads<kDim>, kKeysBackwardShared<kDim>, plan.stream,
                       true},
           tiled);
  }
}

template <class T, int kDim>
void launch_backward(const TiledCall& tiled, const TiledPlan& plan) {
  if (!plan.state_given) launch_state<T, kDim>(tiled, plan);
  if (plan.has_rows) {
    launch_rows_backward<T, kDim>(tiled, plan);
    launch_join_rows(tiled, plan.stream);
  }
  launch_state_gradients(tiled, plan);
  if (plan.has_keys) launch_keys_backward<T, kDim>(tiled, plan);
}

template <class T>
void state_of_width(const TiledCall& tiled, const TiledPlan& plan) {
  switch (plan.width) {
    case 32:
      return launch_state<T, 32>(tiled, plan);
    case 64:
      return launch_state<T, 64>(tiled, plan);
    case 128:
      return launch_state<T, 128>(tiled, plan);
    default:
      return launch_state<T, 256>(tiled, plan);
  }
}

template <class T>
void forward_of_width(const TiledCall& tiled, const TiledPlan& plan) {
  switch (plan.width) {
    case 32:
      return launch_forward<T, 32>(tiled, plan);
    case 64:
      return launch_forward<T, 64>(tiled, plan);
    case 128:
      return launch_forward<T, 128>(tiled, plan);
    default:
      return launch_forward<T, 256>(tiled, plan);
  }
}

template <class T>
void backward_of_width(const TiledCall& tiled, const TiledPlan& plan) {
  switch (plan.width) {
    case 32:
      return launch_backward<T, 32>(tiled, plan);
    case 64:
      return launch_backward<T, 64>(tiled, plan);
    case 128:
      return launch_backward<T, 128>(tiled, plan);
    default:
      return launch_backward<T, 256>(tiled, plan);
  }
}

}  // namespace lln::cuda
