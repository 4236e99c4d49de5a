// The handle of the stable ABI is a pointer to a tensor of LibTorch that it owns.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/ops/handles.h"

#include <ATen/autocast_mode.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>

#include <string>

#include "lln/error.h"

namespace lln_torch {
namespace {

[[noreturn]] void refuse_tensor(const char* name, const std::string& text) {
  throw lln::Error(lln::ErrorCode::invalid_argument, std::string(name) + " " + text);
}

}  // namespace

void check_readable(const char* name, const at::Tensor& x) {
  if (!x.defined()) refuse_tensor(name, "is not given: expected a tensor");
  if (!x.is_cpu() && !x.is_cuda()) {
    refuse_tensor(name, "is on device " + x.device().str() + ": expected cpu or cuda");
  }
  if (x.layout() != at::kStrided) refuse_tensor(name, "is sparse: expected a strided tensor");
}

binding::Tensor to_binding(const char* name, const at::Tensor& x) {
  check_readable(name, x);
  return binding::Tensor(torch::aot_inductor::new_tensor_handle(at::Tensor(x.resolve_neg())));
}

binding::OptionalTensor to_binding_optional(const char* name, const at::Tensor& x) {
  if (!x.defined()) return {};
  return to_binding(name, x);
}

at::Tensor from_binding(const binding::Tensor& x) {
  return *torch::aot_inductor::tensor_handle_to_tensor_pointer(x.get());
}

at::Tensor from_binding_optional(const binding::Tensor& x) {
  at::Tensor tensor = from_binding(x);
  return tensor.dim() == 1 && tensor.size(0) == 0 ? at::Tensor() : tensor;
}

at::Tensor with_contiguous_channels(const at::Tensor& x) {
  if (!x.defined() || x.layout() != at::kStrided || x.dim() == 0) return x;
  return x.stride(-1) == 1 ? x : x.contiguous();
}

at::Tensor in_autocast_type(const at::Tensor& x) {
  if (!x.defined() || x.scalar_type() == at::kDouble || !x.is_floating_point()) return x;
  const at::DeviceType device = x.device().type();
  if (device != at::kCPU && device != at::kCUDA) return x;
  if (!at::autocast::is_autocast_enabled(device)) return x;
  return x.to(at::autocast::get_autocast_dtype(device));
}

}  // namespace lln_torch
