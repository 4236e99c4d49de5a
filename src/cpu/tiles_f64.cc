// The tiles of the instruments, compiled once per target; Highway chooses, since no kernel list
// names these.
// SPDX-License-Identifier: Apache-2.0
#include "cpu/highway.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/tiles_f64.cc"
#include <hwy/foreach_target.h>
// foreach_target first
#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <cmath>
#include <limits>

#include "cpu/load_f64-inl.h"
#include "cpu/tiles_f64.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using f64::kLanes;
using f64::kTag;
using f64::Vec;
static_assert(kPadF64 % kLanes == 0);
constexpr double kNegInf = -std::numeric_limits<double>::infinity();

// Accumulators that leave registers for the operands: 6 x 4 of 32, 6 x 2 of 16.
constexpr std::int64_t kTileRows = 6;
constexpr std::int64_t kTileVectors = HWY_TARGET == HWY_AVX3 ? 4 : 2;

struct Output {
  double* data;
  std::int64_t ld;
  bool add;
};

template <std::int64_t kM, std::int64_t kV>
HWY_INLINE void multiply_tile(std::int64_t k, const LeftF64& a, const double* HWY_RESTRICT b,
                              std::int64_t ldb, const Output& c) {
  Vec acc[kM][kV];
  HWY_UNROLL(8)
  for (std::int64_t i = 0; i < kM; ++i) {
    HWY_UNROLL(8)
    for (std::int64_t j = 0; j < kV; ++j) {
      acc[i][j] = c.add ? hn::LoadU(kTag, c.data + i * c.ld + j * kLanes) : hn::Zero(kTag);
    }
  }
  const double* a_k = a.data;
  for (std::int64_t p = 0; p < k; ++p, a_k += a.column, b += ldb) {
    Vec b_p[kV];
    HWY_UNROLL(8)
    for (std::int64_t j = 0; j < kV; ++j) b_p[j] = hn::LoadU(kTag, b + j * kLanes);
    HWY_UNROLL(8)
    for (std::int64_t i = 0; i < kM; ++i) {
      const Vec a_ip = hn::Set(kTag, a_k[i * a.row]);
      HWY_UNROLL(8)
      for (std::int64_t j = 0; j < kV; ++j) acc[i][j] = hn::MulAdd(a_ip, b_p[j], acc[i][j]);
    }
  }
  HWY_UNROLL(8)
  for (std::int64_t i = 0; i < kM; ++i) {
    HWY_UNROLL(8)
    for (std::int64_t j = 0; j < kV; ++j) {
      hn::StoreU(acc[i][j], kTag, c.data + i * c.ld + j * kLanes);
    }
  }
}

template <std::int64_t kV>
HWY_INLINE void multiply_columns(std::int64_t m, std::int64_t k, LeftF64 a, const double* b,
                                 std::int64_t ldb, Output c) {
  for (; m >= kTileRows; m -= kTileRows) {
    multiply_tile<kTileRows, kV>(k, a, b, ldb, c);
    a.data += kTileRows * a.row;
    c.data += kTileRows * c.ld;
  }
  for (; m > 0; --m) {
    multiply_tile<1, kV>(k, a, b, ldb, c);
    a.data += a.row;
    c.data += c.ld;
  }
}

void multiply_any(std::int64_t m, std::int64_t n, std::int64_t k, LeftF64 a, const double* b,
                  std::int64_t ldb, double* c, std::int64_t ldc, bool add) {
  std::int64_t vectors = n / kLanes;
  Output out{c, ldc, add};
  for (; vectors >= kTileVectors; vectors -= kTileVectors) {
    multiply_columns<kTileVectors>(m, k, a, b, ldb, out);
    b += kTileVectors * kLanes;
    out.data += kTileVectors * kLanes;
  }
  for (; vectors > 0; --vectors) {
    multiply_columns<1>(m, k, a, b, ldb, out);
    b += kLanes;
    out.data += kLanes;
  }
}

template <DType kType>
void load_typed(const ConstRows& rows, std::int64_t first, std::int64_t count, double scale,
                double* out, std::int64_t ldo) {
  const Vec factor = hn::Set(kTag, scale);
  for (std::int64_t i = 0; i < count; ++i, out += ldo) {
    const std::byte* const row = rows.row(first + i);
    std::int64_t c = 0;
    for (; c + kLanes <= rows.width; c += kLanes) {
      const Vec numbers = f64::load<kType>(row + c * f64::kBytes<kType>);
      hn::StoreU(hn::Mul(factor, numbers), kTag, out + c);
    }
    if (c == rows.width) continue;
    const Vec part = f64::load_part<kType>(row + c * f64::kBytes<kType>, rows.width - c);
    hn::StoreU(hn::Mul(factor, part), kTag, out + c);  // into the padding of the tile
  }
}

void load_any(const ConstRows& rows, std::int64_t first, std::int64_t count, double scale,
              double* out, std::int64_t ldo) {
  switch (rows.dtype) {
    case DType::f32:
      return load_typed<DType::f32>(rows, first, count, scale, out, ldo);
    case DType::f16:
      return load_typed<DType::f16>(rows, first, count, scale, out, ldo);
    case DType::bf16:
      return load_typed<DType::bf16>(rows, first, count, scale, out, ldo);
    case DType::f64:
      return load_typed<DType::f64>(rows, first, count, scale, out, ldo);
  }
}

void add_log_sum_any(const double* x, std::int64_t rows, std::int64_t ld, double* largest,
                     double* sum) {
  const Vec none = hn::Set(kTag, kNegInf);
  for (std::int64_t c = 0; c < ld; c += kLanes) {
    const Vec before = hn::LoadU(kTag, largest + c);
    Vec top = before;
    for (std::int64_t i = 0; i < rows; ++i) top = hn::Max(top, hn::LoadU(kTag, x + i * ld + c));
    // Nothing seen: subtract 0 from -inf, not -inf.
    const Vec reference = hn::IfThenElseZero(hn::Gt(top, none), top);
    Vec total = hn::Mul(hn::LoadU(kTag, sum + c), hn::Exp(kTag, hn::Sub(before, reference)));
    for (std::int64_t i = 0; i < rows; ++i) {
      const Vec value = hn::LoadU(kTag, x + i * ld + c);
      total = hn::Add(total, hn::Exp(kTag, hn::Sub(value, reference)));
    }
    hn::StoreU(top, kTag, largest + c);
    hn::StoreU(total, kTag, sum + c);
  }
}

void exponentiate_any(double* x, std::int64_t rows, std::int64_t ld, const double* shift) {
  for (std::int64_t c = 0; c < ld; c += kLanes) {
    const Vec by = hn::LoadU(kTag, shift + c);
    for (std::int64_t i = 0; i < rows; ++i) {
      double* const at = x + i * ld + c;
      hn::StoreU(hn::Exp(kTag, hn::Sub(hn::LoadU(kTag, at), by)), kTag, at);
    }
  }
}

void logarithms_any(const double* x, std::int64_t count, double* y) {
  const Vec zero = hn::Zero(kTag), none = hn::Set(kTag, kNegInf);
  std::int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    const Vec value = hn::LoadU(kTag, x + i);
    hn::StoreU(hn::IfThenElse(hn::Gt(value, zero), hn::Log(kTag, value), none), kTag, y + i);
  }
  for (; i < count; ++i) y[i] = x[i] > 0 ? std::log(x[i]) : kNegInf;
}

struct Columns {
  Vec count, squares, p_log_p, power1, power2, power3, power4;
};

void add_weights_any(const double* p, const double* log_p, std::int64_t rows, std::int64_t ld,
                     double pivot, const WeightSums& sums) {
  const Vec none = hn::Set(kTag, kNegInf), centre = hn::Set(kTag, pivot), one = hn::Set(kTag, 1.0);
  for (std::int64_t c = 0; c < ld; c += kLanes) {
    Columns s{hn::LoadU(kTag, sums.count + c),   hn::LoadU(kTag, sums.squares + c),
              hn::LoadU(kTag, sums.p_log_p + c), hn::LoadU(kTag, sums.power1 + c),
              hn::LoadU(kTag, sums.power2 + c),  hn::LoadU(kTag, sums.power3 + c),
              hn::LoadU(kTag, sums.power4 + c)};
    for (std::int64_t i = 0; i < rows; ++i) {
      const Vec weight = hn::LoadU(kTag, p + i * ld + c), log = hn::LoadU(kTag, log_p + i * ld + c);
      const auto positive = hn::Gt(log, none);
      const Vec d = hn::IfThenElseZero(positive, hn::Sub(log, centre)), d2 = hn::Mul(d, d);
      s.count = hn::Add(s.count, hn::IfThenElseZero(positive, one));
      s.squares = hn::MulAdd(weight, weight, s.squares);
      s.p_log_p = hn::MulAdd(weight, hn::IfThenElseZero(positive, log), s.p_log_p);
      s.power1 = hn::Add(s.power1, d);
      s.power2 = hn::Add(s.power2, d2);
      s.power3 = hn::MulAdd(d2, d, s.power3);
      s.power4 = hn::MulAdd(d2, d2, s.power4);
    }
    hn::StoreU(s.count, kTag, sums.count + c);
    hn::StoreU(s.squares, kTag, sums.squares + c);
    hn::StoreU(s.p_log_p, kTag, sums.p_log_p + c);
    hn::StoreU(s.power1, kTag, sums.power1 + c);
    hn::StoreU(s.power2, kTag, sums.power2 + c);
    hn::StoreU(s.power3, kTag, sums.power3 + c);
    hn::StoreU(s.power4, kTag, sums.power4 + c);
  }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lln::cpu {

HWY_EXPORT(multiply_any);
HWY_EXPORT(load_any);
HWY_EXPORT(add_log_sum_any);
HWY_EXPORT(exponentiate_any);
HWY_EXPORT(logarithms_any);
HWY_EXPORT(add_weights_any);

void multiply(std::int64_t m, std::int64_t n, std::int64_t k, LeftF64 a, const double* b,
              std::int64_t ldb, double* c, std::int64_t ldc, bool add) {
  HWY_DYNAMIC_DISPATCH(multiply_any)(m, n, k, a, b, ldb, c, ldc, add);
}

void load_rows(const ConstRows& rows, std::int64_t first, std::int64_t count, double scale,
               double* out, std::int64_t ldo) {
  HWY_DYNAMIC_DISPATCH(load_any)(rows, first, count, scale, out, ldo);
}

void add_log_sum(const double* x, std::int64_t rows, std::int64_t ld, double* largest,
                 double* sum) {
  HWY_DYNAMIC_DISPATCH(add_log_sum_any)(x, rows, ld, largest, sum);
}

void exponentiate(double* x, std::int64_t rows, std::int64_t ld, const double* shift) {
  HWY_DYNAMIC_DISPATCH(exponentiate_any)(x, rows, ld, shift);
}

void logarithms(const double* x, std::int64_t count, double* y) {
  HWY_DYNAMIC_DISPATCH(logarithms_any)(x, count, y);
}

void add_weights(const double* p, const double* log_p, std::int64_t rows, std::int64_t ld,
                 double pivot, const WeightSums& sums) {
  HWY_DYNAMIC_DISPATCH(add_weights_any)(p, log_p, rows, ld, pivot, sums);
}

}  // namespace lln::cpu
#endif
