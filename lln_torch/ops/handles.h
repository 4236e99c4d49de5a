// Tensors of LibTorch as those of the stable ABI, in which the core is bound, and back: the same
// tensor behind another handle, nothing copied. Only tensors that the binding can read pass.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include "lln_torch/binding/tensors.h"

namespace lln_torch {

// Throws lln::Error where `x` is no strided tensor in host memory or on a CUDA device; `name` is
// the argument's.
void check_readable(const char* name, const at::Tensor& x);
// After that check.
binding::Tensor to_binding(const char* name, const at::Tensor& x);
// None for a tensor that is not defined.
binding::OptionalTensor to_binding_optional(const char* name, const at::Tensor& x);
at::Tensor from_binding(const binding::Tensor& x);
// Not defined where the binding gives a tensor without elements for "none".
at::Tensor from_binding_optional(const binding::Tensor& x);

// `x` with contiguous channels, which the core asks for; a copy only where they are not.
at::Tensor with_contiguous_channels(const at::Tensor& x);
// `x` in the type of autocast where that is on for its device; f64 stays.
at::Tensor in_autocast_type(const at::Tensor& x);

}  // namespace lln_torch
