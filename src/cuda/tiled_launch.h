// The launches of the tiled family for one element type; each type is compiled in its own file.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_call.h"

namespace lln::cuda {

// The widths that kernels exist for: rows are padded to the least that holds dim and dim_v.
inline constexpr std::int64_t kTiledWidths[] = {32, 64, 128, 256};

struct TiledPlan {
  int width = 0;             // of kTiledWidths
  bool whole = false;        // every sequence is one key job
  bool state_given = false;  // backward: (c, C) need not be computed
  // Pieces may have no keys, or no rows: nothing is launched over them.
  bool has_keys = true, has_rows = true;
  std::int64_t key_jobs = 0, row_jobs = 0, key_rows_jobs = 0;  // times heads: blocks
  cudaStream_t stream = nullptr;
};

struct TiledLaunches {
  void (*state)(const TiledCall&, const TiledPlan&);  // (c, C) of all sequences
  void (*forward)(const TiledCall&, const TiledPlan&);
  void (*backward)(const TiledCall&, const TiledPlan&);
};

// Partial sums to states: of keys, and of rows in the backward pass. False where nothing was
// launched, because the partial sums are the states.
void launch_join_keys(const TiledCall& tiled, cudaStream_t stream);
bool launch_join_rows(const TiledCall& tiled, cudaStream_t stream);

// Pieces of a longer sequence, where the call has something of it; otherwise nothing is launched.
// The given state joins that of the keys.
void launch_given_state(const TiledCall& tiled, const TiledPlan& plan);
// The gradient of the state of all keys joins the sums over rows, and that of the given state is
// written.
void launch_state_gradients(const TiledCall& tiled, const TiledPlan& plan);

extern const TiledLaunches kTiledBf16;
extern const TiledLaunches kTiledF16;

}  // namespace lln::cuda
