// The launches of Diag and LLN+Diag for one element type; each type is compiled in its own file.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_launch.h"

namespace lln::cuda {

// (c, C) must have been launched before these.
struct TiledDiagLaunches {
  void (*forward)(const TiledCall&, const TiledPlan&);
  void (*backward)(const TiledCall&, const TiledPlan&);
};

extern const TiledDiagLaunches kTiledDiagBf16;
extern const TiledDiagLaunches kTiledDiagF16;

}  // namespace lln::cuda
