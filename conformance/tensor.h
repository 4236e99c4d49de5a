// Tensors that own their memory, in any type and layout of the API, readable as double.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "lln/tensor.h"

namespace lln::conformance {

enum class Layout : std::uint8_t {
  bhnd,  // contiguous [batch, head, token, channel]
  bnhd,  // contiguous [batch, token, head, channel]
  gaps,  // rows with unused elements behind them
};

// Owns one tensor; every byte of a new one is 0xFF, which is NaN in all four types.
class Tensor {
 public:
  Tensor() = default;  // not given
  Tensor(DType dtype, const Shape& shape, Layout layout = Layout::bhnd);

  const Shape& shape() const { return shape_; }
  DType dtype() const { return dtype_; }
  bool given() const { return shape_ != Shape{}; }
  std::int64_t elements() const { return shape_[0] * shape_[1] * shape_[2] * shape_[3]; }
  View view();
  ConstView view() const;
  const std::vector<std::byte>& bytes() const { return bytes_; }
  std::span<std::byte> writable_bytes() { return bytes_; }

  double get(std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t c) const;
  void set(std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t c, double value);
  // Calls body(b, h, n, c) for every element, channels fastest.
  template <class Body>
  void for_each(Body&& body) const {
    for (std::int64_t b = 0; b < shape_[0]; ++b)
      for (std::int64_t h = 0; h < shape_[1]; ++h)
        for (std::int64_t n = 0; n < shape_[2]; ++n)
          for (std::int64_t c = 0; c < shape_[3]; ++c) body(b, h, n, c);
  }
  bool gaps_untouched() const;  // the bytes that belong to no element are still 0xFF

 private:
  std::int64_t index(std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t c) const {
    return b * stride_[0] + h * stride_[1] + n * stride_[2] + c * stride_[3];
  }

  DType dtype_ = DType::f32;
  Shape shape_{};
  Stride stride_{};
  std::vector<std::byte> bytes_;
};

// Rounds to a type, as storing and loading does.
double round_to(DType dtype, double value);

// Tensors by the names that the API gives them.
class TensorSet {
 public:
  struct Entry {
    std::string name;
    Tensor tensor;
  };
  void add(std::string name, Tensor tensor);
  Tensor& at(std::string_view name);
  const Tensor& at(std::string_view name) const;
  bool has(std::string_view name) const;
  View view(std::string_view name);  // not given where there is no such tensor
  const std::vector<Entry>& entries() const { return entries_; }

 private:
  std::vector<Entry> entries_;
};

}  // namespace lln::conformance
