// A sum over the ranks of a group that gradients flow through.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "lln_torch/parallel/rank_group.h"

namespace lln_torch {

// The same on all ranks; the gradient of `x` is the sum of those that the ranks have of it. Every
// rank has to run its backward pass. The group outlives the graph.
at::Tensor sum_over_ranks(const at::Tensor& x, const RankGroup& group);

}  // namespace lln_torch
