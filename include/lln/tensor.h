// Views over memory that the caller owns. Every tensor of the API is four-dimensional,
// [batch, head, token, channel], in any strided layout whose channels are contiguous: a
// [batch, token, head, channel] array needs other strides, not a copy.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace lln {

// f64 is taken by the reference kernels alone.
enum class DType : std::uint8_t { f32, f16, bf16, f64 };

std::size_t size_of(DType dtype) noexcept;
const char* to_string(DType dtype) noexcept;

enum class DeviceKind : std::uint8_t { cpu, cuda };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  int index = 0;
  bool operator==(const Device&) const = default;
};

std::string to_string(Device device);

using Shape = std::array<std::int64_t, 4>;   // [batch, head, token, channel]
using Stride = std::array<std::int64_t, 4>;  // in elements

Stride contiguous_stride(const Shape& shape) noexcept;
std::string to_string(const Shape& shape);

// A default-constructed view means "not given".
struct ConstView {
  const void* data = nullptr;
  DType dtype = DType::f32;
  Device device;
  Shape shape{};
  Stride stride{};
  bool given() const noexcept { return data != nullptr || shape != Shape{}; }
};

struct View {
  void* data = nullptr;
  DType dtype = DType::f32;
  Device device;
  Shape shape{};
  Stride stride{};
  bool given() const noexcept { return data != nullptr || shape != Shape{}; }
  operator ConstView() const noexcept { return {data, dtype, device, shape, stride}; }
};

// Views of host memory: contiguous when no stride is given.
ConstView view(const void* data, DType dtype, const Shape& shape) noexcept;
ConstView view(const void* data, DType dtype, const Shape& shape, const Stride& stride) noexcept;
View view(void* data, DType dtype, const Shape& shape) noexcept;
View view(void* data, DType dtype, const Shape& shape, const Stride& stride) noexcept;
inline ConstView view(const float* data, const Shape& s) noexcept {
  return view(static_cast<const void*>(data), DType::f32, s);
}
inline View view(float* data, const Shape& s) noexcept {
  return view(static_cast<void*>(data), DType::f32, s);
}

// One number for every sequence and head, in host memory.
inline ConstView scalar(const float* value) noexcept { return view(value, Shape{1, 1, 1, 1}); }

// Integers: lengths and cumulative lengths.
struct IndexView {
  const void* data = nullptr;
  bool wide = false;        // 64-bit integers; otherwise 32-bit
  std::int64_t count = -1;  // -1: not given, which an empty list is not
  Device device;

  IndexView() = default;
  IndexView(std::span<const std::int32_t> values)
      : data(values.data()), count(static_cast<std::int64_t>(values.size())) {}
  IndexView(std::span<const std::int64_t> values)
      : data(values.data()), wide(true), count(static_cast<std::int64_t>(values.size())) {}
  bool given() const noexcept { return count >= 0; }
  std::int64_t operator[](std::int64_t i) const noexcept {
    return wide ? static_cast<const std::int64_t*>(data)[i]
                : static_cast<const std::int32_t*>(data)[i];
  }
};

// One byte per key, not zero where the key is valid: [batch, token].
struct MaskView {
  const std::uint8_t* data = nullptr;
  std::array<std::int64_t, 2> shape{};
  std::array<std::int64_t, 2> stride{};
  Device device;
  bool given() const noexcept { return data != nullptr || shape[0] != 0 || shape[1] != 0; }
};

MaskView mask_view(const std::uint8_t* data, std::int64_t batch, std::int64_t tokens) noexcept;

inline constexpr Device cuda_device(int index = 0) noexcept { return {DeviceKind::cuda, index}; }

// The same view of memory that is on another device: on(cuda_device(), view(pointer, dtype,
// shape)). All tensors, lengths and masks of a call are on one device.
template <class AnyView>
AnyView on(Device device, AnyView view) noexcept {
  view.device = device;
  return view;
}

}  // namespace lln
