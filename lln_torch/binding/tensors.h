// Tensors of torch as views of the core, and new tensors for its results. Nothing is copied: a view
// has the strides of its tensor.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "lln/exec.h"
#include "lln/tensor.h"

namespace lln_torch::binding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

lln::Device device_of(const Tensor& x);
// Throws lln::Error where the core has no such type; `name` is the argument's.
lln::DType dtype_of(const char* name, const Tensor& x);
ScalarType scalar_type(lln::DType dtype);
// That of numbers beside the tensors: scales, weights and states. f64 with f64 tensors.
inline lln::DType wide_type(lln::DType dtype) {
  return dtype == lln::DType::f64 ? lln::DType::f64 : lln::DType::f32;
}

// [batch, head, token, channel].
lln::View view4(const char* name, const Tensor& x);
// One number per call [], per head [heads], or per sequence and head [S, heads].
lln::View scale_view(const char* name, const Tensor& x);
// Weights of LLN+Diag: [] per call, [heads], [heads, dim_v], or [batch, heads, tokens].
lln::View weight_view(const char* name, const Tensor& x);
// 32-bit or 64-bit integers, contiguous.
lln::IndexView index_view(const char* name, const OptionalTensor& x);
// bool or uint8 [batch, tokens].
lln::MaskView mask_view(const char* name, const OptionalTensor& x);
// The batch, or the packed sequences.
std::int64_t sequence_count(const lln::ConstView& x, const lln::IndexView& cu_seqlens);

// One number, where `like` is; nobody waits for it.
Tensor number_tensor(const Tensor& like, double value, lln::DType type);
// Uninitialised, on the device of `like`.
Tensor new_tensor(const Tensor& like, std::span<const std::int64_t> sizes, ScalarType type);
Tensor new_host_tensor(std::span<const std::int64_t> sizes, ScalarType type);
// [batch, head, token, channel] with `channels` channels in the order of `like`: heads inside
// tokens where they are so there.
Tensor new_like(const Tensor& like, std::int64_t channels);
// The one that stands for "none": ops return tensors always.
inline Tensor no_tensor(const Tensor& like) {
  return new_tensor(like, std::array<std::int64_t, 1>{0}, ScalarType::Float);
}

}  // namespace lln_torch::binding
