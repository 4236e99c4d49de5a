// f64 tiles for the instruments: products, exponentials and sums down the columns of a tile. Apart
// from the f32 tiles of the kernels, because a measurement should not add rounding of its own to
// what it measures, and because ln P needs the range of f64.
//
// A tile is [rows, ld] with ld a multiple of kPadF64; the padding is computed with and never used.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "cpu/rows.h"

namespace lln::cpu {

inline constexpr std::int64_t kPadF64 = 8;  // lanes of the widest vector
inline constexpr std::int64_t padded_f64(std::int64_t n) {
  return (n + kPadF64 - 1) / kPadF64 * kPadF64;
}

// The left operand of a product: a(m, k) = data[m * row + k * column].
struct LeftF64 {
  const double* data;
  std::int64_t row;
  std::int64_t column;
};

// c[m, n] = a[m, k] b[k, n], or added to c; n a multiple of kPadF64. Each element is one chain of
// multiply-adds over k in order.
void multiply(std::int64_t m, std::int64_t n, std::int64_t k, LeftF64 a, const double* b,
              std::int64_t ldb, double* c, std::int64_t ldc, bool add);

// out[i, c] = scale * rows[first + i, c] for any dtype; zeros up to a whole vector.
void load_rows(const ConstRows& rows, std::int64_t first, std::int64_t count, double scale,
               double* out, std::int64_t ldo);

// Takes the logsumexp of every column of x [rows, ld] into (largest, sum): ln of what was seen is
// largest + ln(sum). They start as (-inf, 0).
void add_log_sum(const double* x, std::int64_t rows, std::int64_t ld, double* largest, double* sum);

// x = e^(x - shift) with one shift for each column.
void exponentiate(double* x, std::int64_t rows, std::int64_t ld, const double* shift);

// y = ln(x), -inf where x is 0.
void logarithms(const double* x, std::int64_t count, double* y);

// Sums down the columns of weights p and their logarithms, each [ld]; added to what is there. The
// powers are those of ln p - pivot over the positive weights.
struct WeightSums {
  double* count;  // of positive weights
  double* squares;
  double* p_log_p;
  double* power1;
  double* power2;
  double* power3;
  double* power4;
};
void add_weights(const double* p, const double* log_p, std::int64_t rows, std::int64_t ld,
                 double pivot, const WeightSums& sums);

}  // namespace lln::cpu
