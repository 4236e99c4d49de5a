// Sums of two tensors, each times a weight of LLN+Diag: what joins results of two calls, and what
// gives one of them its part of a gradient.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/device_call.h"

namespace lln::cuda {

struct WeighedRows {
  ConstView rows;  // of the shape and type of the result; without data it is left out
  Weight weight;
};

// to = x.weight x + y.weight y, rounded once. The result may be one of the two.
void launch_weighed_rows(const View& to, const WeighedRows& x, const WeighedRows& y,
                         cudaStream_t stream);

}  // namespace lln::cuda
