// Descriptions of tensors for Hopper's copy engine, made on the host for each call.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include "cuda/device_call.h"

namespace lln::cuda::sm90 {

struct TensorShape {
  std::int64_t batch = 0, heads = 0, tokens = 0, dim = 0;
};

// Boxes of 64 tokens x 64 channels of a bf16 tensor, swizzled by 128 bytes. False where the copy
// engine cannot take it (a driver without it, strides that it does not know).
bool make_tensor_map(CUtensorMap& map, const Rows& rows, const TensorShape& shape);

}  // namespace lln::cuda::sm90
