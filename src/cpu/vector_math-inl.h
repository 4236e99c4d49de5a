// Vector primitives: 2^x, conversion of the caller's rows to f32 tiles and back, feature maps.
// Compiled once per target (included from files that go through foreach_target).
// All exponents are in units of log2, so that every exponential is a bare 2^x.
// SPDX-License-Identifier: Apache-2.0
#if defined(LLN_CPU_VECTOR_MATH_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LLN_CPU_VECTOR_MATH_INL_H_
#undef LLN_CPU_VECTOR_MATH_INL_H_
#else
#define LLN_CPU_VECTOR_MATH_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "cpu/plan.h"
#include "cpu/rows.h"
#include "math/feature_map.h"
#include "math/half.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

using Tag = hn::CappedTag<float, kPad>;
using Vec = hn::Vec<Tag>;
constexpr Tag kTag;
constexpr std::int64_t kLanes = static_cast<std::int64_t>(hn::MaxLanes(Tag()));
static_assert(kPad % kLanes == 0);

// Channels rounded up to whole vectors of this target: at most what tiles are padded to.
constexpr std::int64_t whole_vectors(std::int64_t n) { return (n + kLanes - 1) / kLanes * kLanes; }

constexpr float kLog2E = 1.44269504F;
constexpr float kLn2 = 0.693147181F;
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr float kNegInf = -std::numeric_limits<float>::infinity();

// x, but not above or below a limit; NaN stays. Vector instructions return their second operand for
// NaN, Highway's scalar target the other one.
HWY_INLINE Vec at_most(Vec limit, Vec x) {
#if HWY_TARGET == HWY_SCALAR
  return hn::IfThenElse(hn::Gt(x, limit), limit, x);
#else
  return hn::Min(limit, x);
#endif
}
HWY_INLINE Vec at_least(Vec limit, Vec x) {
#if HWY_TARGET == HWY_SCALAR
  return hn::IfThenElse(hn::Lt(x, limit), limit, x);
#else
  return hn::Max(limit, x);
#endif
}

// 2^x, to 2e-7 relative and exact at 0; 0 below -125 (never subnormal), +inf from 128 on, NaN for
// NaN. Minimax polynomials of degree 5 for 2^r with constant 1, relative error 8e-8 before
// rounding.
HWY_INLINE Vec exp2(Vec x) {
#if HWY_TARGET == HWY_AVX3
  // r = x - floor(x), and p * 2^floor(x) as one instruction: a third fewer than with integers.
  const __m512 r = _mm512_reduce_ps(x.raw, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(1.86713007e-3F);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.01703032e-3F));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.57999131e-2F));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.40164450e-1F));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.93151312e-1F));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0F));
  const __mmask16 keep = _mm512_cmp_ps_mask(x.raw, _mm512_set1_ps(-125.0F), _CMP_NLT_UQ);
  return Vec{_mm512_maskz_scalef_ps(keep, p, x.raw)};
#else
  const hn::RebindToSigned<Tag> di;
  // Adding 1.5 * 2^23 leaves round(x) in the low bits of the sum.
  const Vec magic = hn::Set(kTag, 12582912.0F);
  const Vec below = at_most(hn::Set(kTag, 128.0F), x);
  const Vec shifted = hn::Add(below, magic);
  const Vec r = hn::Sub(below, hn::Sub(shifted, magic));
  Vec p = hn::Set(kTag, 1.5345812e-4F);
  p = hn::MulAdd(p, r, hn::Set(kTag, 1.3399931e-3F));
  p = hn::MulAdd(p, r, hn::Set(kTag, 9.6184890e-3F));
  p = hn::MulAdd(p, r, hn::Set(kTag, 5.5503288e-2F));
  p = hn::MulAdd(p, r, hn::Set(kTag, 2.4022647e-1F));
  p = hn::MulAdd(p, r, hn::Set(kTag, 6.9314721e-1F));
  p = hn::MulAdd(p, r, hn::Set(kTag, 1.0F));
  const auto exponent = hn::ShiftLeft<23>(hn::BitCast(di, shifted));
  const Vec scaled = hn::BitCast(kTag, hn::Add(hn::BitCast(di, p), exponent));
  return hn::IfThenZeroElse(hn::Lt(x, hn::Set(kTag, -125.0F)), scaled);
#endif
}

HWY_INLINE float reduce_sum(Vec v) { return hn::GetLane(hn::SumOfLanes(kTag, v)); }
HWY_INLINE float reduce_max(Vec v) { return hn::GetLane(hn::MaxOfLanes(kTag, v)); }

// Not Ne(x, x): Highway compares with an ordered predicate on some targets.
HWY_INLINE hn::Mask<Tag> is_nan(Vec x) { return hn::Not(hn::Eq(x, x)); }

// Kept within +-kExponentLimit; NaN stays.
HWY_INLINE Vec clamp_exponent(Vec x) {
  const Vec limit = hn::Set(kTag, static_cast<float>(kExponentLimit));
  return at_most(limit, at_least(hn::Neg(limit), x));
}

template <DType kType>
constexpr std::int64_t bytes_of() {
  return kType == DType::f32 ? 4 : 2;
}

template <DType kType>
HWY_INLINE Vec load_lanes(const std::byte* p) {
  if constexpr (kType == DType::f32) {
    return hn::LoadU(kTag, reinterpret_cast<const float*>(p));
  } else if constexpr (kType == DType::f16) {
    const hn::Rebind<hwy::float16_t, Tag> d16;
    return hn::PromoteTo(kTag, hn::LoadU(d16, reinterpret_cast<const hwy::float16_t*>(p)));
  } else {
    const hn::Rebind<hwy::bfloat16_t, Tag> d16;
    return hn::PromoteTo(kTag, hn::LoadU(d16, reinterpret_cast<const hwy::bfloat16_t*>(p)));
  }
}

template <DType kType>
HWY_INLINE void store_lanes(Vec v, std::byte* p) {
  if constexpr (kType == DType::f32) {
    hn::StoreU(v, kTag, reinterpret_cast<float*>(p));
  } else if constexpr (kType == DType::f16) {
#if HWY_TARGET == HWY_AVX2 || HWY_TARGET == HWY_AVX3 || HWY_ARCH_ARM_A64
    const hn::Rebind<hwy::float16_t, Tag> d16;
    hn::StoreU(hn::DemoteTo(d16, v), d16, reinterpret_cast<hwy::float16_t*>(p));
#else  // Highway's emulation truncates
    HWY_ALIGN float lanes[kLanes];
    hn::Store(v, kTag, lanes);
    std::uint16_t half[kLanes];
    for (std::int64_t i = 0; i < kLanes; ++i) half[i] = f16_from_f32(lanes[i]);
    std::memcpy(p, half, sizeof(half));
#endif
  } else {  // Highway 1.0 truncates to bf16; this rounds to nearest even
    const hn::RebindToUnsigned<Tag> du;
    const hn::RebindToSigned<Tag> di;
    const hn::Rebind<std::uint16_t, Tag> d16;
    const auto bits = hn::BitCast(du, v);
    const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du, 1));
    const auto rounded = hn::Add(hn::Add(bits, hn::Set(du, 0x7FFF)), odd);
    const auto nan = hn::Or(bits, hn::Set(du, 0x400000));
    const auto not_a_number = hn::RebindMask(du, is_nan(v));
    const auto high = hn::ShiftRight<16>(hn::IfThenElse(not_a_number, nan, rounded));
    hn::StoreU(hn::DemoteTo(d16, hn::BitCast(di, high)), d16, reinterpret_cast<std::uint16_t*>(p));
  }
}

// Calls body(lanes, column) for every full or partial vector of a row; partial ones are filled up
// with zeros and never read past the row.
template <DType kType, class Body>
HWY_INLINE void for_each_vector(const std::byte* row, std::int64_t width, Body&& body) {
  constexpr std::int64_t kSize = bytes_of<kType>();
  std::int64_t c = 0;
  for (; c + kLanes <= width; c += kLanes) body(load_lanes<kType>(row + c * kSize), c);
  if (c < width) {
    alignas(64) std::byte tail[kLanes * kSize] = {};
    std::memcpy(tail, row + c * kSize, static_cast<std::size_t>((width - c) * kSize));
    body(load_lanes<kType>(tail), c);
  }
}

template <class F>
HWY_INLINE void with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::f16:
      return f(std::integral_constant<DType, DType::f16>{});
    case DType::bf16:
      return f(std::integral_constant<DType, DType::bf16>{});
    default:
      return f(std::integral_constant<DType, DType::f32>{});
  }
}

// Row i of the tile is scale * row token(i) of `rows`; padding channels are zero.
HWY_NOINLINE inline void load_tile(const ConstRows& rows, std::int64_t count, Tokens token,
                                   float* HWY_RESTRICT tile, std::int64_t ld, float scale = 1) {
  const Vec factor = hn::Set(kTag, scale);
  with_type(rows.dtype, [&](auto type) HWY_ATTR {
    for (std::int64_t i = 0; i < count; ++i) {
      float* const out = tile + i * ld;
      std::int64_t done = 0;
      for_each_vector<type()>(rows.row(token(i)), rows.width, [&](Vec x, std::int64_t c) HWY_ATTR {
        hn::Store(hn::Mul(x, factor), kTag, out + c);
        done = c + kLanes;
      });
      for (; done < ld; done += kLanes) hn::Store(hn::Zero(kTag), kTag, out + done);
    }
  });
}

// Row token(i) of `rows` = row i of the tile.
HWY_NOINLINE inline void store_tile(const Rows& rows, std::int64_t count, Tokens token,
                                    const float* HWY_RESTRICT tile, std::int64_t ld) {
  with_type(rows.dtype, [&](auto type) HWY_ATTR {
    constexpr std::int64_t kSize = bytes_of<type()>();
    for (std::int64_t i = 0; i < count; ++i) {
      const float* const values = tile + i * ld;
      std::byte* const out = rows.row(token(i));
      std::int64_t c = 0;
      for (; c + kLanes <= rows.width; c += kLanes) {
        store_lanes<type()>(hn::Load(kTag, values + c), out + c * kSize);
      }
      if (c < rows.width) {
        alignas(64) std::byte tail[kLanes * kSize];
        store_lanes<type()>(hn::Load(kTag, values + c), tail);
        std::memcpy(out + c * kSize, tail, static_cast<std::size_t>((rows.width - c) * kSize));
      }
    }
  });
}

HWY_INLINE void store_row(const Rows& rows, std::int64_t token, const float* values) {
  store_tile(rows, 1, token, values, 0);
}

// Rows of f32 in whole vectors can be operands and results of products where they lie.
template <class AnyRows>
HWY_INLINE bool in_place(const AnyRows& rows) {
  return rows.dtype == DType::f32 && rows.width % kLanes == 0;
}

// Row i as floats, and how many of them lie between rows.
HWY_INLINE const float* floats_of(const ConstRows& rows, std::int64_t i) {
  return reinterpret_cast<const float*>(rows.row(i));
}
HWY_INLINE float* floats_of(const Rows& rows, std::int64_t i) {
  return reinterpret_cast<float*>(rows.row(i));
}
template <class AnyRows>
HWY_INLINE std::int64_t leading_dim(const AnyRows& rows) {
  return rows.stride / static_cast<std::int64_t>(sizeof(float));
}

// f(x) and f'(x) of a feature map other than exp, in natural units; see math/feature_map.h.
HWY_INLINE LogFeature<Vec> log_feature_lanes(Feature feature, float power, Vec x) {
  const Vec zero = hn::Zero(kTag);
  const Vec one = hn::Set(kTag, 1.0F);
  Vec value = x;
  Vec slope = one;
  switch (feature) {
    case Feature::exp:
      break;
    case Feature::elu: {
      const auto negative = hn::Le(x, zero);
      const Vec positive = hn::Max(x, zero);
      value = hn::IfThenElse(negative, x, hn::Log1p(kTag, positive));
      slope = hn::IfThenElse(negative, one, hn::Div(one, hn::Add(one, positive)));
      break;
    }
    case Feature::relu: {
      const Vec phi = hn::Add(hn::Max(x, zero), hn::Set(kTag, static_cast<float>(kReluOffset)));
      value = hn::Log(kTag, phi);
      slope = hn::IfThenElseZero(hn::Gt(x, zero), hn::Div(one, phi));
      break;
    }
    case Feature::softplus: {
      const Vec e = hn::Exp(kTag, hn::Neg(hn::Abs(x)));
      const Vec softplus = hn::Add(hn::Max(x, zero), hn::Log1p(kTag, e));
      const Vec sigmoid = hn::Div(hn::IfThenElse(hn::Ge(x, zero), one, e), hn::Add(one, e));
      const auto low = hn::Lt(x, hn::Set(kTag, static_cast<float>(kSoftplusSwitch)));
      const Vec half = hn::Mul(e, hn::Set(kTag, 0.5F));
      value = hn::IfThenElse(low, hn::Sub(x, half), hn::Log(kTag, softplus));
      slope = hn::IfThenElse(low, hn::Sub(one, half), hn::Div(sigmoid, softplus));
      break;
    }
    case Feature::power: {
      const Vec p = hn::Set(kTag, power);
      const Vec floor = hn::Set(kTag, std::log(static_cast<float>(kPowerFloor)));
      const Vec magnitude = hn::Max(hn::Abs(x), hn::Set(kTag, 1e-38F));
      const Vec raw = hn::Mul(p, hn::Log(kTag, magnitude));
      const auto above = hn::Gt(raw, floor);
      value = hn::IfThenElse(above, raw, floor);
      slope = hn::IfThenElseZero(above, hn::Div(p, x));
      break;
    }
  }
  const auto nan = is_nan(x);
  return {hn::IfThenElse(nan, x, value), hn::IfThenElse(nan, x, slope)};
}

// alpha or beta in units of log2, finite.
HWY_INLINE float log2_scale(float scale) {
  constexpr double kLargest = std::numeric_limits<float>::max();
  return static_cast<float>(
      std::clamp(static_cast<double>(scale) * 1.4426950408889634, -kLargest, kLargest));
}

// Exponents log2(phi(scale * x)) of a tile of q or k, and the derivatives f'(scale * x) in `slope`
// where it is not null (exp needs none: they are 1).
HWY_NOINLINE inline void load_exponents(const ConstRows& rows, std::int64_t count, Tokens token,
                                        Feature feature, float power, float scale,
                                        float* HWY_RESTRICT tile, std::int64_t ld,
                                        float* HWY_RESTRICT slope) {
  const bool exponential = feature == Feature::exp;
  load_tile(rows, count, token, tile, ld, exponential ? log2_scale(scale) : scale);
  for (std::int64_t i = 0; i < count * ld; i += kLanes) {
    Vec x = clamp_exponent(hn::Load(kTag, tile + i));
    if (!exponential) {
      const LogFeature<Vec> f = log_feature_lanes(feature, power, x);
      if (slope != nullptr) hn::Store(f.derivative, kTag, slope + i);
      x = hn::Mul(f.value, hn::Set(kTag, kLog2E));
    }
    hn::Store(x, kTag, tile + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#endif
