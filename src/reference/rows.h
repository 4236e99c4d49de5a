// Rows of one head as f64, and the access to tensors of any dtype that fills and stores them.
// Everything after this header is arithmetic on doubles.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "lln/tensor.h"
#include "math/half.h"

namespace lln::reference {

struct Rows {
  std::int64_t count = 0;
  std::int64_t width = 0;
  std::vector<double> data;  // [count, width]

  Rows() = default;
  Rows(std::int64_t rows, std::int64_t columns, double value = 0)
      : count(rows), width(columns), data(static_cast<std::size_t>(rows * columns), value) {}
  double* operator[](std::int64_t row) { return data.data() + row * width; }
  const double* operator[](std::int64_t row) const { return data.data() + row * width; }
  void append(const Rows& rows) {
    data.insert(data.end(), rows.data.begin(), rows.data.end());
    count += rows.count;
  }
};

inline std::int64_t offset(const Stride& stride, std::int64_t b, std::int64_t h, std::int64_t n,
                           std::int64_t c) {
  return b * stride[0] + h * stride[1] + n * stride[2] + c * stride[3];
}

inline double load(const ConstView& view, std::int64_t i) {
  switch (view.dtype) {
    case DType::f32:
      return static_cast<const float*>(view.data)[i];
    case DType::f64:
      return static_cast<const double*>(view.data)[i];
    case DType::f16:
      return f32_from_f16(static_cast<const std::uint16_t*>(view.data)[i]);
    case DType::bf16:
      return f32_from_bf16(static_cast<const std::uint16_t*>(view.data)[i]);
  }
  return 0;
}

inline void store(const View& view, std::int64_t i, double value) {
  const auto single = static_cast<float>(value);
  switch (view.dtype) {
    case DType::f32:
      static_cast<float*>(view.data)[i] = single;
      break;
    case DType::f64:
      static_cast<double*>(view.data)[i] = value;
      break;
    case DType::f16:
      static_cast<std::uint16_t*>(view.data)[i] = f16_from_f32(single);
      break;
    case DType::bf16:
      static_cast<std::uint16_t*>(view.data)[i] = bf16_from_f32(single);
      break;
  }
}

// Rows begin to begin + count of one head. Rows that keep(row) refuses are never read: zero.
template <class Keep>
Rows load_rows(const ConstView& view, std::int64_t b, std::int64_t h, std::int64_t begin,
               std::int64_t count, Keep keep) {
  Rows rows(count, view.shape[3]);
  for (std::int64_t n = 0; n < count; ++n) {
    if (!keep(n)) continue;
    for (std::int64_t c = 0; c < rows.width; ++c) {
      rows[n][c] = load(view, offset(view.stride, b, h, begin + n, c));
    }
  }
  return rows;
}

// Rows first to first + count of `rows`.
inline void store_rows(const View& view, std::int64_t b, std::int64_t h, std::int64_t begin,
                       const Rows& rows, std::int64_t first, std::int64_t count) {
  for (std::int64_t n = 0; n < count; ++n) {
    for (std::int64_t c = 0; c < rows.width; ++c) {
      store(view, offset(view.stride, b, h, begin + n, c), rows[first + n][c]);
    }
  }
}
inline void store_rows(const View& view, std::int64_t b, std::int64_t h, std::int64_t begin,
                       const Rows& rows) {
  store_rows(view, b, h, begin, rows, 0, rows.count);
}

}  // namespace lln::reference
