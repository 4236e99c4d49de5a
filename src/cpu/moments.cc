// Moments of the rows of a head: one pass, sums of x - pivot and of its square in f64. Reading is
// the limit (a f32 vector costs one conversion, one difference, one addition and one multiply-add),
// so f64 is free, and no blocks of f32 sums have to be joined. The order of the sums does not
// depend on strides: a layout changes no bit.
// SPDX-License-Identifier: Apache-2.0
#include "cpu/highway.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/moments.cc"
#include <hwy/foreach_target.h>
// foreach_target first
#include <hwy/cache_control.h>
#include <hwy/highway.h>

#include "cpu/load_f64-inl.h"
#include "cpu/moments.h"
#include "math/moments.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

using f64::kLanes;
using f64::kTag;
using f64::load;
using f64::load_part;
using f64::Vec;

// Rows of one head lie far apart where tokens come before heads, and the CPU does not guess the
// next. Eight rows ahead halve the time of such a layout (12 heads of 65536 tokens, 64 channels:
// 150 to 70 ms on one core of a Xeon at 2.8 GHz, 2026).
constexpr std::int64_t kAhead = 8;

HWY_INLINE void prefetch(const std::byte* row, std::int64_t bytes) {
  for (std::int64_t i = 0; i < bytes; i += 64) hwy::Prefetch(row + i);
}

struct Sums {
  Vec sum, squares;
};

HWY_INLINE Sums zero_sums() { return {hn::Zero(kTag), hn::Zero(kTag)}; }

HWY_INLINE void add(Vec difference, Sums& sums) {
  sums.sum = hn::Add(sums.sum, difference);
  sums.squares = hn::MulAdd(difference, difference, sums.squares);
}

HWY_INLINE Sums joined(const Sums& x, const Sums& y) {
  return {hn::Add(x.sum, y.sum), hn::Add(x.squares, y.squares)};
}

template <DType kType>
Moments sum_rows(const ConstRows& rows, std::int64_t begin, std::int64_t end,
                 const std::uint8_t* mask, std::int64_t mask_stride) {
  constexpr std::int64_t kSize = f64::kBytes<kType>;
  const auto counts = [&](std::int64_t row) {
    return mask == nullptr || mask[row * mask_stride] != 0;
  };
  while (begin < end && !counts(begin)) ++begin;
  if (begin == end || rows.width == 0) return {};
  const double pivot = hn::GetLane(load_part<kType>(rows.row(begin), 1));
  const Vec pivots = hn::Set(kTag, pivot);
  const std::int64_t whole = rows.width / kLanes * kLanes;
  const auto rest = hn::FirstN(kTag, static_cast<std::size_t>(rows.width - whole));
  // Four of each, so that additions do not wait for each other; named, so that they stay in
  // registers.
  Sums s0 = zero_sums(), s1 = zero_sums(), s2 = zero_sums(), s3 = zero_sums();
  std::int64_t tokens = 0;
  for (std::int64_t i = begin; i < end; ++i) {
    if (!counts(i)) continue;
    ++tokens;
    const std::byte* const row = rows.row(i);
    if (i + kAhead < end) prefetch(rows.row(i + kAhead), rows.width * kSize);
    const auto difference = [&](std::int64_t c)
                                HWY_ATTR { return hn::Sub(load<kType>(row + c * kSize), pivots); };
    std::int64_t c = 0;
    for (; c + 4 * kLanes <= whole; c += 4 * kLanes) {
      add(difference(c), s0);
      add(difference(c + kLanes), s1);
      add(difference(c + 2 * kLanes), s2);
      add(difference(c + 3 * kLanes), s3);
    }
    for (; c < whole; c += kLanes) add(difference(c), s0);
    if (c < rows.width) {
      const Vec part = load_part<kType>(row + c * kSize, rows.width - c);
      add(hn::IfThenElseZero(rest, hn::Sub(part, pivots)), s0);
    }
  }
  const Sums sums = joined(joined(s0, s1), joined(s2, s3));
  return moments_from_sums(static_cast<double>(tokens) * static_cast<double>(rows.width), pivot,
                           hn::GetLane(hn::SumOfLanes(kTag, sums.sum)),
                           hn::GetLane(hn::SumOfLanes(kTag, sums.squares)));
}

Moments sum_any(const ConstRows& rows, std::int64_t begin, std::int64_t end,
                const std::uint8_t* mask, std::int64_t mask_stride) {
  switch (rows.dtype) {
    case DType::f32:
      return sum_rows<DType::f32>(rows, begin, end, mask, mask_stride);
    case DType::f16:
      return sum_rows<DType::f16>(rows, begin, end, mask, mask_stride);
    case DType::bf16:
      return sum_rows<DType::bf16>(rows, begin, end, mask, mask_stride);
    case DType::f64:
      return sum_rows<DType::f64>(rows, begin, end, mask, mask_stride);
  }
  return {};
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lln::cpu {

// One operation without an entry in the kernel lists, so Highway chooses the target.
HWY_EXPORT(sum_any);

Moments sum_moments(const ConstRows& rows, std::int64_t begin, std::int64_t end,
                    const std::uint8_t* mask, std::int64_t mask_stride) {
  return HWY_DYNAMIC_DISPATCH(sum_any)(rows, begin, end, mask, mask_stride);
}

}  // namespace lln::cpu
#endif
