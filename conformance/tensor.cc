// Storage, access and rounding of tensors.
// SPDX-License-Identifier: Apache-2.0
#include "conformance/tensor.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "math/half.h"

namespace lln::conformance {
namespace {

Stride layout_stride(const Shape& shape, Layout layout) {
  switch (layout) {
    case Layout::bhnd:
      break;
    case Layout::bnhd:
      return {shape[1] * shape[2] * shape[3], shape[3], shape[1] * shape[3], 1};
    case Layout::gaps: {
      const std::int64_t row = shape[3] + 5;
      const std::int64_t head = shape[2] * row + 3;
      return {shape[1] * head + 2, head, row, 1};
    }
  }
  return contiguous_stride(shape);
}

}  // namespace

Tensor::Tensor(DType dtype, const Shape& shape, Layout layout)
    : dtype_(dtype), shape_(shape), stride_(layout_stride(shape, layout)) {
  std::int64_t count = elements();
  if (count > 0 && layout == Layout::gaps) count = shape[0] * stride_[0];
  bytes_.assign(static_cast<std::size_t>(count) * size_of(dtype), std::byte{0xFF});
}

View Tensor::view() {
  return given() ? lln::view(static_cast<void*>(bytes_.data()), dtype_, shape_, stride_) : View{};
}

ConstView Tensor::view() const {
  if (!given()) return {};
  return lln::view(static_cast<const void*>(bytes_.data()), dtype_, shape_, stride_);
}

double Tensor::get(std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t c) const {
  const std::byte* at =
      bytes_.data() + static_cast<std::size_t>(index(b, h, n, c)) * size_of(dtype_);
  if (dtype_ == DType::f64) {
    double value = 0;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  if (dtype_ == DType::f32) {
    float value = 0;
    std::memcpy(&value, at, sizeof value);
    return value;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, at, sizeof bits);
  return dtype_ == DType::f16 ? f32_from_f16(bits) : f32_from_bf16(bits);
}

void Tensor::set(std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t c, double value) {
  std::byte* at = bytes_.data() + static_cast<std::size_t>(index(b, h, n, c)) * size_of(dtype_);
  const auto single = static_cast<float>(value);
  if (dtype_ == DType::f64) {
    std::memcpy(at, &value, sizeof value);
  } else if (dtype_ == DType::f32) {
    std::memcpy(at, &single, sizeof single);
  } else {
    const std::uint16_t bits = dtype_ == DType::f16 ? f16_from_f32(single) : bf16_from_f32(single);
    std::memcpy(at, &bits, sizeof bits);
  }
}

bool Tensor::gaps_untouched() const {
  std::vector<bool> used(bytes_.size() / size_of(dtype_), false);
  for_each([&](std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t c) {
    used[static_cast<std::size_t>(index(b, h, n, c))] = true;
  });
  for (std::size_t i = 0; i < bytes_.size(); ++i) {
    if (!used[i / size_of(dtype_)] && bytes_[i] != std::byte{0xFF}) return false;
  }
  return true;
}

double round_to(DType dtype, double value) {
  const auto single = static_cast<float>(value);
  switch (dtype) {
    case DType::f64:
      return value;
    case DType::f32:
      return single;
    case DType::f16:
      return f32_from_f16(f16_from_f32(single));
    case DType::bf16:
      return f32_from_bf16(bf16_from_f32(single));
  }
  return value;
}

void TensorSet::add(std::string name, Tensor tensor) {
  entries_.push_back({std::move(name), std::move(tensor)});
}

bool TensorSet::has(std::string_view name) const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [&](const Entry& entry) { return entry.name == name; });
}

const Tensor& TensorSet::at(std::string_view name) const {
  for (const Entry& entry : entries_) {
    if (entry.name == name) return entry.tensor;
  }
  throw std::out_of_range("no tensor '" + std::string(name) + "' in this set");
}

Tensor& TensorSet::at(std::string_view name) {
  return const_cast<Tensor&>(std::as_const(*this).at(name));
}

View TensorSet::view(std::string_view name) { return has(name) ? at(name).view() : View{}; }

}  // namespace lln::conformance
