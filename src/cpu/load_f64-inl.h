// Vectors of f64 from numbers of any dtype, for sums that must not round: moments and instruments.
// SPDX-License-Identifier: Apache-2.0
#if defined(LLN_CPU_LOAD_F64_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LLN_CPU_LOAD_F64_INL_H_
#undef LLN_CPU_LOAD_F64_INL_H_
#else
#define LLN_CPU_LOAD_F64_INL_H_
#endif

#include <hwy/highway.h>

#include <cstddef>
#include <cstring>
#include <type_traits>

#include "lln/tensor.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {
namespace f64 {

namespace hn = hwy::HWY_NAMESPACE;

using Tag = hn::CappedTag<double, 8>;
using Vec = hn::Vec<Tag>;
constexpr Tag kTag;
constexpr std::int64_t kLanes = static_cast<std::int64_t>(hn::MaxLanes(Tag()));

template <DType kType>
constexpr std::int64_t kBytes = kType == DType::f64   ? 8
                                : kType == DType::f32 ? 4
                                                      : 2;

template <DType kType>
HWY_INLINE Vec load(const std::byte* p) {
  const hn::Rebind<float, Tag> d32;
  if constexpr (kType == DType::f64) {
    return hn::LoadU(kTag, reinterpret_cast<const double*>(p));
  } else if constexpr (kType == DType::f32) {
    return hn::PromoteTo(kTag, hn::LoadU(d32, reinterpret_cast<const float*>(p)));
  } else {
    using Half = std::conditional_t<kType == DType::f16, hwy::float16_t, hwy::bfloat16_t>;
    const hn::Rebind<Half, Tag> d16;
    const auto half = hn::LoadU(d16, reinterpret_cast<const Half*>(p));
    return hn::PromoteTo(kTag, hn::PromoteTo(d32, half));
  }
}

// The first `count` numbers, then zeros.
template <DType kType>
HWY_INLINE Vec load_part(const std::byte* p, std::int64_t count) {
  alignas(64) std::byte part[8 * kLanes] = {};
  std::memcpy(part, p, static_cast<std::size_t>(count * kBytes<kType>));
  return load<kType>(part);
}

}  // namespace f64
}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#endif
