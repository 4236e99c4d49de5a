// Views and their text forms.
// SPDX-License-Identifier: Apache-2.0
#include "lln/tensor.h"

#include <fmt/format.h>

namespace lln {

std::size_t size_of(DType dtype) noexcept {
  switch (dtype) {
    case DType::f32:
      return 4;
    case DType::f16:
    case DType::bf16:
      return 2;
    case DType::f64:
      return 8;
  }
  return 0;
}

const char* to_string(DType dtype) noexcept {
  switch (dtype) {
    case DType::f32:
      return "f32";
    case DType::f16:
      return "f16";
    case DType::bf16:
      return "bf16";
    case DType::f64:
      return "f64";
  }
  return "?";
}

std::string to_string(Device device) {
  if (device.kind == DeviceKind::cpu) return "cpu";
  return device.index == 0 ? "cuda" : fmt::format("cuda:{}", device.index);
}

Stride contiguous_stride(const Shape& shape) noexcept {
  return {shape[1] * shape[2] * shape[3], shape[2] * shape[3], shape[3], 1};
}

std::string to_string(const Shape& shape) {
  return fmt::format("[{}, {}, {}, {}]", shape[0], shape[1], shape[2], shape[3]);
}

ConstView view(const void* data, DType dtype, const Shape& shape) noexcept {
  return view(data, dtype, shape, contiguous_stride(shape));
}

ConstView view(const void* data, DType dtype, const Shape& shape, const Stride& stride) noexcept {
  return {data, dtype, Device{}, shape, stride};
}

View view(void* data, DType dtype, const Shape& shape) noexcept {
  return view(data, dtype, shape, contiguous_stride(shape));
}

View view(void* data, DType dtype, const Shape& shape, const Stride& stride) noexcept {
  return {data, dtype, Device{}, shape, stride};
}

MaskView mask_view(const std::uint8_t* data, std::int64_t batch, std::int64_t tokens) noexcept {
  return {data, {batch, tokens}, {tokens, 1}, Device{}};
}

}  // namespace lln
