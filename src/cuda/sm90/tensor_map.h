// Descriptions of tensors for Hopper's copy engine, made on the host for each call.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include "cuda/device_call.h"

namespace lln::cuda::sm90 {

// The tensors of a call in boxes of 64 rows x 64 channels, swizzled by 128 bytes.
struct TensorMaps {
  CUtensorMap q, k, v, o;
  CUtensorMap g, dq, dk, dv;
};

// Of bf16 tensors; those without tokens get none, and no kernel may be launched over them. False
// where the copy engine cannot take one (a driver without it, strides that it does not know).
bool make_tensor_maps(TensorMaps& maps, const DeviceCall& call, std::int64_t batch, Op op);

}  // namespace lln::cuda::sm90
