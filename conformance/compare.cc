// The comparison and the tolerance of compare.h.
// SPDX-License-Identifier: Apache-2.0
#include "conformance/compare.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace lln::conformance {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

double half_least_subnormal(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return 0x1p-25;
    case DType::f32:
    case DType::bf16:  // bf16 has f32's exponents; its coarser subnormals round like u(bf16)
      return dtype == DType::bf16 ? 0x1p-134 : 0x1p-150;
    case DType::f64:
      break;
  }
  return 0;
}

bool same_kind(double x, double y) {  // both finite, both NaN, or the same infinity
  if (std::isnan(x) || std::isnan(y)) return std::isnan(x) && std::isnan(y);
  if (std::isinf(x) || std::isinf(y)) return x == y;
  return true;
}

// The distance of neighbouring numbers of a type at x, in units of its roundoff.
double neighbour_distance(double x) { return x > 0 ? std::exp2(std::ilogb(x) + 1) : 0; }

}  // namespace

double unit_roundoff(DType dtype) {
  switch (dtype) {
    case DType::f16:
      return 0x1p-11;
    case DType::bf16:
      return 0x1p-8;
    case DType::f32:
      return 0x1p-24;
    case DType::f64:
      break;
  }
  return 0x1p-53;
}

double Comparison::ratio() const {
  if (error == 0) return 0;
  return tolerance() > 0 ? error / tolerance() : kInfinity;
}

std::string to_string(const Comparison& c) {
  std::string text = fmt::format(
      "{:<14} error {:.2e} of {:.2e} allowed (2 x plain {:.2e} + rounding {:.2e}), "
      "largest {:.2e}",
      c.name, c.error, c.tolerance(), c.plain_error, c.rounding, c.largest);
  if (!c.mismatch.empty()) text += "; " + c.mismatch;
  return text;
}

Comparison compare(const std::string& name, const Tensor& x, const Tensor& reference,
                   const Tensor& plain, const Tensor& sizes, double exponent,
                   const Making& making) {
  Comparison result;
  result.name = name;
  double size = 0;
  reference.for_each([&](std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t c) {
    const double expected = reference.get(b, h, n, c);
    const double found = x.get(b, h, n, c);
    if (!same_kind(expected, found)) {
      if (result.mismatch.empty()) {
        result.mismatch =
            fmt::format("{}[{}, {}, {}, {}] is {}: expected {}", name, b, h, n, c, found, expected);
      }
      result.error = kInfinity;
    }
    if (!std::isfinite(expected)) return;
    result.largest = std::max(result.largest, std::abs(expected));
    result.error = std::max(result.error, std::abs(found - expected));
    const double plain_error = std::abs(plain.get(b, h, n, c) - expected);
    if (std::isfinite(plain_error)) result.plain_error = std::max(result.plain_error, plain_error);
    if (const double s = sizes.get(b, h, n, c); std::isfinite(s)) size = std::max(size, s);
  });
  if (!x.gaps_untouched()) {
    result.error = kInfinity;
    result.mismatch += " written between its rows";
  }
  const double units =
      making.operands == Operands::narrow ? neighbour_distance(result.largest) : result.largest;
  result.rounding = unit_roundoff(x.dtype()) * units + half_least_subnormal(x.dtype()) +
                    unit_roundoff(DType::f32) * (1 + exponent) * size;
  // Errors of many roundings are a matter of chance, and where a result is one number the plain
  // evaluation's is one throw of the dice: this is more than three of their deviations.
  if (making.rounded_terms > 0) {
    result.rounding += 2 * making.term_roundoff * size / std::sqrt(making.rounded_terms);
  }
  return result;
}

}  // namespace lln::conformance
