// How a call of Diag or LLN+Diag becomes launches: passes in order on one stream, each checked.
// The first one starts early where a part of LLN comes before it, its own or another family's.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_diag_keys_backward.cuh"
#include "cuda/tiled_diag_launch.h"
#include "cuda/tiled_diag_rows.cuh"
#include "cuda/tiled_diag_rows_backward.cuh"
#include "cuda/tiled_diag_wide.cuh"
#include "cuda/tiled_launch.cuh"

namespace lln::cuda {

template <class T, int kDim, bool kLln>
void launch_diag_forward(const TiledCall& tiled, const TiledPlan& plan) {
  const bool several = kDiagTile % tiled.call.diag_block != 0;
  launch("rows_diag_forward",
         several ? rows_diag_forward<T, kDim, kLln, true> : rows_diag_forward<T, kDim, kLln, false>,
         LaunchShape{plan.row_jobs * tiled.call.heads, kDiagThreads,
                     DiagForwardShape<kDim, kLln>::kShared, plan.stream, kLln || tiled.adds},
         tiled);
}

// Whether blocks divide a tile is nothing that these kernels were compiled for.
template <class T>
void launch_wide_diag_forward(const TiledCall& tiled, const TiledPlan& plan) {
  using Shape = WideDiagShape;
  launch("wide_diag_forward", wide_diag_forward<T>,
         LaunchShape{plan.row_jobs * tiled.call.heads, Shape::kThreads, Shape::kShared, plan.stream,
                     tiled.adds},
         tiled);
}

template <class T, int kDim, bool kLln>
void launch_diag_backward(const TiledCall& tiled, const TiledPlan& plan) {
  using RowsShape = DiagRowsBackwardShape<kDim, kLln>;
  using KeysShape = DiagKeysBackwardShape<kDim, kLln>;
  constexpr int kThreads = DiagSplit<kDim>::kThreads;
  const DeviceCall& call = tiled.call;
  auto* rows = rows_diag_backward<T, kDim, kLln, true>;
  if constexpr (kDim != WideDiagShape::kDim) {
    const bool several = kDiagTile % call.diag_block != 0;
    if (!several) rows = rows_diag_backward<T, kDim, kLln, false>;
  }
  launch("rows_diag_backward", rows,
         LaunchShape{plan.row_jobs * call.heads, kThreads, RowsShape::kShared, plan.stream,
                     tiled.adds || (kLln && !plan.state_given)},
         tiled);
  const bool joined = kLln && launch_join_rows(tiled, plan.stream);
  // The first tiles of keys are under way before the kernel waits; their rows' statistics are older
  // than the previous launch only where that is the join.
  launch("keys_diag_backward", keys_diag_backward<T, kDim, kLln>,
         LaunchShape{plan.key_rows_jobs * call.heads_k, kThreads, KeysShape::kShared, plan.stream,
                     joined},
         tiled);
}

// Calls body.operator()<kDim, kLln>().
template <class Body>
void with_diag_shape(const TiledCall& tiled, const TiledPlan& plan, Body&& body) {
  const bool lln = tiled.call.kind == Kind::lln_diag;
  switch (plan.width) {
    case WideDiagShape::kDim:  // an LLN part is other kernels'
      return body.template operator()<WideDiagShape::kDim, false>();
    case 32:
      return lln ? body.template operator()<32, true>() : body.template operator()<32, false>();
    case 64:
      return lln ? body.template operator()<64, true>() : body.template operator()<64, false>();
    default:
      return lln ? body.template operator()<128, true>() : body.template operator()<128, false>();
  }
}

template <class T>
void diag_forward_of_width(const TiledCall& tiled, const TiledPlan& plan) {
  with_diag_shape(tiled, plan, [&]<int kDim, bool kLln>() {
    if constexpr (kDim == WideDiagShape::kDim) {
      launch_wide_diag_forward<T>(tiled, plan);
    } else {
      launch_diag_forward<T, kDim, kLln>(tiled, plan);
    }
  });
}

template <class T>
void diag_backward_of_width(const TiledCall& tiled, const TiledPlan& plan) {
  with_diag_shape(tiled, plan,
                  [&]<int kDim, bool kLln>() { launch_diag_backward<T, kDim, kLln>(tiled, plan); });
}

}  // namespace lln::cuda
