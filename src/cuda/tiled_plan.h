// What the tiled families share on the host: how sequences are cut into jobs, how scratch memory is
// laid out, and which calls must go to the plain family although the problem does not show it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_launch.h"

namespace lln::cuda {

// The least of kTiledWidths that holds dim and dim_v; 0 where none does.
int tiled_width(const Problem& p);

// The jobs of the sums over keys and, in the backward pass, over rows.
Jobs key_jobs(const Problem& p);
Jobs row_sum_jobs(const Problem& p);
// What all tiled families refuse; empty where they do not.
std::string tiled_refusal(const Problem& p);

// Whether the tensors are aligned and no gradient of a parameter is asked for.
bool tiled_takes(const Call& call);
const Kernel& plain_kernel(Op op);

// Enough for this call in the tiled families and in the plain one.
std::size_t tiled_bytes(const Problem& p, int workers);

// A call with its scratch memory laid out and its table of sequences under way, and its launches.
struct TiledWork {
  TiledCall tiled;
  TiledPlan plan;
};
TiledWork prepare_tiled(const Call& call);

}  // namespace lln::cuda
