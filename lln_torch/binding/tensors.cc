// Shapes, strides and types, checked as far as a view can say them; the core checks the rest.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/binding/tensors.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

#include "lln/error.h"

namespace lln_torch::binding {
namespace {

[[noreturn]] void throw_invalid(const std::string& text) {
  throw lln::Error(lln::ErrorCode::invalid_argument, text);
}

[[noreturn]] void refuse(const char* name, const Tensor& x, const char* expected) {
  std::string shape;
  for (const std::int64_t size : x.sizes()) {
    shape += (shape.empty() ? "" : ", ") + std::to_string(size);
  }
  throw_invalid(std::string(name) + " has shape [" + shape + "]: expected " + expected);
}

lln::View bare_view(const char* name, const Tensor& x) {
  return {.data = x.data_ptr(), .dtype = dtype_of(name, x), .device = device_of(x)};
}

}  // namespace

lln::Device device_of(const Tensor& x) {
  if (x.is_cpu()) return {};
  return lln::cuda_device(x.get_device_index());
}

lln::DType dtype_of(const char* name, const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return lln::DType::f32;
    case ScalarType::Half:
      return lln::DType::f16;
    case ScalarType::BFloat16:
      return lln::DType::bf16;
    case ScalarType::Double:
      return lln::DType::f64;
    default:
      throw_invalid(std::string(name) +
                    " has a type that is none of float32, float16, bfloat16 and "
                    "float64");
  }
}

ScalarType scalar_type(lln::DType dtype) {
  switch (dtype) {
    case lln::DType::f16:
      return ScalarType::Half;
    case lln::DType::bf16:
      return ScalarType::BFloat16;
    case lln::DType::f64:
      return ScalarType::Double;
    case lln::DType::f32:
      break;
  }
  return ScalarType::Float;
}

lln::View view4(const char* name, const Tensor& x) {
  if (x.dim() != 4) refuse(name, x, "[batch, heads, tokens, channels]");
  lln::View view = bare_view(name, x);
  const auto sizes = x.sizes();
  const auto strides = x.strides();
  for (std::size_t i = 0; i < 4; ++i) {
    view.shape[i] = sizes[i];
    view.stride[i] = strides[i];
  }
  if (view.shape[3] == 1) view.stride[3] = 1;  // torch leaves anything there
  return view;
}

lln::View scale_view(const char* name, const Tensor& x) {
  const std::int64_t dims = x.dim();
  if (dims > 2) refuse(name, x, "[], [heads] or [sequences, heads]");
  lln::View view = bare_view(name, x);
  view.shape = {1, 1, 1, 1};
  view.stride = {1, 1, 1, 1};
  const auto place = static_cast<std::size_t>(2 - dims);
  for (std::size_t i = 0; i < static_cast<std::size_t>(dims); ++i) {
    view.shape[place + i] = x.size(static_cast<std::int64_t>(i));
    view.stride[place + i] = x.stride(static_cast<std::int64_t>(i));
  }
  return view;
}

lln::View weight_view(const char* name, const Tensor& x) {
  static constexpr std::array<std::array<std::size_t, 3>, 4> kPlaces{{{}, {1}, {1, 3}, {0, 1, 2}}};
  const auto dims = static_cast<std::size_t>(x.dim());
  if (dims >= kPlaces.size()) {
    refuse(name, x, "[], [heads], [heads, dim_v] or [batch, heads, tokens]");
  }
  lln::View view = bare_view(name, x);
  view.shape = {1, 1, 1, 1};
  view.stride = {1, 1, 1, 1};
  for (std::size_t i = 0; i < dims; ++i) {
    view.shape[kPlaces[dims][i]] = x.size(static_cast<std::int64_t>(i));
    view.stride[kPlaces[dims][i]] = x.stride(static_cast<std::int64_t>(i));
  }
  return view;
}

lln::IndexView index_view(const char* name, const OptionalTensor& x) {
  lln::IndexView view;
  if (!x) return view;
  const ScalarType type = x->scalar_type();
  if (x->dim() != 1) refuse(name, *x, "one dimension");
  if (type != ScalarType::Int && type != ScalarType::Long) {
    throw_invalid(std::string(name) + " must be of type int32 or int64");
  }
  if (x->size(0) > 1 && x->stride(0) != 1) {
    throw_invalid(std::string(name) + " must be contiguous");
  }
  view.data = x->data_ptr();
  view.wide = type == ScalarType::Long;
  view.count = x->size(0);
  view.device = device_of(*x);
  return view;
}

lln::MaskView mask_view(const char* name, const OptionalTensor& x) {
  if (!x) return {};
  const ScalarType type = x->scalar_type();
  if (x->dim() != 2) refuse(name, *x, "[batch, tokens]");
  if (type != ScalarType::Bool && type != ScalarType::Byte) {
    throw_invalid(std::string(name) +
                  " must be of type bool, True where a token "
                  "counts");
  }
  return {.data = static_cast<const std::uint8_t*>(x->data_ptr()),
          .shape = {x->size(0), x->size(1)},
          .stride = {x->stride(0), x->stride(1)},
          .device = device_of(*x)};
}

std::int64_t sequence_count(const lln::ConstView& x, const lln::IndexView& cu_seqlens) {
  if (!cu_seqlens.given()) return x.shape[0];
  if (cu_seqlens.count == 0) {
    throw_invalid("cu_seqlens has no elements: expected one more than there are sequences");
  }
  return cu_seqlens.count - 1;
}

namespace {

struct TorchDevice {
  std::int32_t type = 0;
  std::int32_t index = 0;
};

TorchDevice torch_device(const Tensor& x) {
  TorchDevice device;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &device.type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(x.get(), &device.index));
  return device;
}

Tensor new_strided(TorchDevice device, std::span<const std::int64_t> sizes,
                   std::span<const std::int64_t> strides, ScalarType type) {
  AtenTensorHandle handle = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<std::int64_t>(sizes.size()), sizes.data(), strides.data(),
      torch::stable::detail::to<std::int32_t>(torch::stable::detail::from(type)), device.type,
      device.index, &handle));
  return Tensor(handle);
}

Tensor new_contiguous(TorchDevice device, std::span<const std::int64_t> sizes, ScalarType type) {
  std::array<std::int64_t, 4> strides{};
  std::int64_t stride = 1;
  for (std::size_t i = sizes.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<std::int64_t>(sizes[i], 1);
  }
  return new_strided(device, sizes, std::span(strides).first(sizes.size()), type);
}

}  // namespace

Tensor new_tensor(const Tensor& like, std::span<const std::int64_t> sizes, ScalarType type) {
  return new_contiguous(torch_device(like), sizes, type);
}

Tensor new_host_tensor(std::span<const std::int64_t> sizes, ScalarType type) {
  return new_contiguous({.type = aoti_torch_device_type_cpu()}, sizes, type);
}

Tensor number_tensor(const Tensor& like, double value, lln::DType type) {
  Tensor number = new_tensor(like, std::array<std::int64_t, 2>{1, 1}, scalar_type(type));
  if (!number.is_cpu()) {
    torch::stable::fill_(number, value);
  } else if (type == lln::DType::f64) {
    *static_cast<double*>(number.data_ptr()) = value;
  } else {
    *static_cast<float*>(number.data_ptr()) = static_cast<float>(value);
  }
  return number;
}

Tensor new_like(const Tensor& like, std::int64_t channels) {
  const std::array<std::int64_t, 4> sizes{like.size(0), like.size(1), like.size(2), channels};
  if (like.stride(1) >= like.stride(2)) return new_tensor(like, sizes, like.scalar_type());
  const auto room = [](std::int64_t size) { return std::max<std::int64_t>(size, 1); };
  const std::int64_t head = room(channels);
  const std::int64_t token = head * room(sizes[1]);
  const std::array<std::int64_t, 4> strides{token * room(sizes[2]), head, token, 1};
  return new_strided(torch_device(like), sizes, strides, like.scalar_type());
}

}  // namespace lln_torch::binding
