// The pieces of LLN attention on the identity o = W C (docs/theory.md): weighted sums over keys,
// the state (c, C) that they become, and the softmax over channels that reads it. Exponents are in
// units of log2; both factors are probabilities, so nothing overflows and no epsilon is needed.
// SPDX-License-Identifier: Apache-2.0
#if defined(LLN_CPU_LLN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LLN_CPU_LLN_INL_H_
#undef LLN_CPU_LLN_INL_H_
#else
#define LLN_CPU_LLN_INL_H_
#endif

#include "cpu/exponentials-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {

// A sum keeps its reference exponent until a key, or in the fast way the mean of a tile, exceeds it
// by this much: the [d, dv] sums are hardly ever rescaled.
constexpr float kReferenceSlack = 8;

HWY_INLINE void reset(const KeySums& sums, const Dims& dims) {
  *sums.value_scale = 1;
  std::fill(sums.m, sums.m + dims.dp, kLowest);
  std::fill(sums.s, sums.s + dims.dp, 0.0F);
  std::fill(sums.a, sums.a + dims.state(), 0.0F);
}

// The largest exponent of each channel of a column of the tile, in four chains.
HWY_INLINE Vec column_max(const float* HWY_RESTRICT u, std::int64_t count, std::int64_t ld) {
  const Vec lowest = hn::Set(kTag, kLowest);
  Vec a = lowest, b = lowest, c = lowest, d = lowest;
  std::int64_t i = 0;
  for (; i + 4 <= count; i += 4, u += 4 * ld) {
    a = hn::Max(a, hn::Load(kTag, u));
    b = hn::Max(b, hn::Load(kTag, u + ld));
    c = hn::Max(c, hn::Load(kTag, u + 2 * ld));
    d = hn::Max(d, hn::Load(kTag, u + 3 * ld));
  }
  for (; i < count; ++i, u += ld) a = hn::Max(a, hn::Load(kTag, u));
  return hn::Max(hn::Max(a, b), hn::Max(c, d));
}

// Makes `raised` the reference of the channels from c on; rescales their sums.
HWY_INLINE void raise_channels(const Dims& dims, std::int64_t c, Vec raised, const KeySums& sums) {
  HWY_ALIGN float factor[kLanes];
  hn::Store(exp2(hn::Sub(hn::Load(kTag, sums.m + c), raised)), kTag, factor);
  hn::Store(raised, kTag, sums.m + c);
  for (std::int64_t l = 0; l < kLanes; ++l) {
    if (factor[l] == 1.0F) continue;
    sums.s[c + l] *= factor[l];
    scale_row(sums.a + (c + l) * dims.dvp, dims.dvp, factor[l]);
  }
}

// Raises the reference of the channels in which the tile exceeds it.
HWY_INLINE void raise_reference(const Dims& dims, const float* HWY_RESTRICT u, std::int64_t count,
                                const KeySums& sums) {
  for (std::int64_t c = 0; c < dims.dp; c += kLanes) {
    const Vec high = column_max(u + c, count, dims.dp);
    const Vec m = hn::Load(kTag, sums.m + c);
    const auto above = hn::Gt(high, hn::Add(m, hn::Set(kTag, kReferenceSlack)));
    if (hn::AllFalse(kTag, above)) continue;
    raise_channels(dims, c, hn::IfThenElse(above, high, m), sums);
  }
}

// Whether a channel's weights in a tile of `count` keys add up to more than the slack allows.
HWY_INLINE bool exceeds_reference(const float* HWY_RESTRICT tile_sum, std::int64_t width,
                                  std::int64_t count) {
  const Vec most = hn::Set(kTag, std::exp2(kReferenceSlack) * static_cast<float>(count));
  for (std::int64_t c = 0; c < width; c += kLanes) {
    if (!hn::AllFalse(kTag, hn::Gt(hn::Load(kTag, tile_sum + c), most))) return true;
  }
  return false;
}

// The reference of all channels becomes at least `high`.
HWY_INLINE void raise_reference(const float* HWY_RESTRICT high, std::int64_t width,
                                const Dims& dims, const KeySums& sums) {
  for (std::int64_t c = 0; c < width; c += kLanes) {
    const Vec m = hn::Load(kTag, sums.m + c);
    raise_channels(dims, c, hn::Max(m, hn::Load(kTag, high + c)), sums);
  }
}

// References of up to this magnitude are far from the limits of f32.
constexpr float kLargestReference = 0x1p100F;

constexpr float kUnlimitedRaise = std::numeric_limits<float>::infinity();

// weights[i, l] = 2^(u_il - m_l) for a tile of keys against the reference of `sums`, which is set
// where the sums are empty and raised where the tile exceeds it; tile_sum[l] their sums. False, and
// the sums are as they were, where a reference would be near the limits of f32 or rise by more than
// `largest_raise`, or a weight is no number.
template <class Words = Floats>
HWY_INLINE bool weigh_against_reference(const Dims& dims, const Exponents& u, std::int64_t count,
                                        Tokens token, float largest_raise, const KeySums& sums,
                                        float* weights, float* tile_sum, Ahead& ahead) {
  const std::int64_t width = u.rows.width;
  const bool empty = sums.s[0] == 0;
  if (!empty) weigh_keys<Words>(u, count, token, sums.m, weights, dims.dp, tile_sum, ahead);
  if (empty || exceeds_reference(tile_sum, width, count)) {
    HWY_ALIGN float high[kMaxDim];
    highest_exponents(u, count, token, high);
    if (!all_within(high, width, kLargestReference)) return false;
    if (empty) {
      std::copy(high, high + width, sums.m);
    } else {
      for (std::int64_t l = 0; l < width; ++l) {
        if (high[l] > sums.m[l] + largest_raise) return false;
      }
      raise_reference(high, width, dims, sums);
    }
    weigh_keys<Words>(u, count, token, sums.m, weights, dims.dp, tile_sum, ahead);
  }
  return all_within(tile_sum, width, kLargeValue);
}

// Whether optimistic sums can be trusted: references far from the limits of f32, and nothing that
// overflowed or came near it.
HWY_INLINE bool sums_are_safe(const Dims& dims, std::int64_t width, const KeySums& sums) {
  return all_within(sums.m, width, kLargestReference) && all_within(sums.s, width, kLargeValue) &&
         all_within(sums.a, dims.state(), kLargeValue);
}

// Adds `count` keys with exponents u[count, dp] and values v[count, dvp]. u becomes 2^(u - m).
HWY_NOINLINE inline void add_keys(const Dims& dims, float* HWY_RESTRICT u,
                                  const float* HWY_RESTRICT v, std::int64_t count,
                                  const KeySums& sums) {
  if (count == 0) return;
  raise_reference(dims, u, count, sums);
  for (std::int64_t c = 0; c < dims.dp; c += kLanes) {
    const Vec m = hn::Load(kTag, sums.m + c);
    Vec sum = hn::Zero(kTag);
    for (std::int64_t i = 0; i < count; ++i) {
      float* const x = u + i * dims.dp + c;
      const Vec e = exp2(hn::Sub(hn::Load(kTag, x), m));
      sum = hn::Add(sum, e);
      hn::Store(e, kTag, x);
    }
    hn::Store(hn::Add(hn::Load(kTag, sums.s + c), sum), kTag, sums.s + c);
  }
  if (*sums.value_scale == 1 && largest_magnitude(v, count * dims.dvp) > kLargeValue) {
    *sums.value_scale = kSmallScale;
    scale_row(sums.a, dims.state(), kSmallScale);
  }
  if (*sums.value_scale != 1) scale_row(u, count * dims.dp, *sums.value_scale);
  gemm(dims.d, dims.dvp, count, by_columns(u, dims.dp), v, dims.dvp, sums.a, dims.dvp, true);
}

// out = factor * in, or out += factor * in; they may be the same.
HWY_INLINE void add_scaled(float* out, const float* in, std::int64_t width, float factor,
                           bool accumulate) {
  const Vec f = hn::Set(kTag, factor);
  for (std::int64_t e = 0; e < width; e += kLanes) {
    const Vec x = hn::Mul(hn::Load(kTag, in + e), f);
    hn::Store(accumulate ? hn::Add(hn::Load(kTag, out + e), x) : x, kTag, out + e);
  }
}

// keep[l] = 2^(from - to) for c of two states, 0 where the first has no key.
HWY_INLINE void decay_factors(const Dims& dims, const float* from, const float* to, float* keep) {
  for (std::int64_t l = 0; l < dims.dp; l += kLanes) {
    const Vec c = hn::Load(kTag, from + l);
    const Vec factor = exp2(hn::Sub(c, hn::Load(kTag, to + l)));
    hn::Store(hn::IfThenZeroElse(hn::Eq(c, hn::Set(kTag, kNegInf)), factor), kTag, keep + l);
  }
}

// The state of `before` and the keys in `sums` together; `before` and `out` may be the same.
// A null `before` is the empty set.
HWY_NOINLINE inline void join(const Dims& dims, const State* before, const KeySums& sums,
                              const State& out) {
  HWY_ALIGN float keep[kMaxDim], add[kMaxDim], high[kMaxDim], mass[kMaxDim];
  for (std::int64_t l = 0; l < dims.dp; l += kLanes) {
    const Vec none = hn::Set(kTag, kNegInf);
    const auto real =
        hn::FirstN(kTag, static_cast<std::size_t>(std::clamp<std::int64_t>(dims.d - l, 0, kLanes)));
    const Vec s = hn::IfThenElseZero(real, hn::Load(kTag, sums.s + l));
    const Vec m = hn::IfThenElse(hn::Eq(s, hn::Zero(kTag)), none, hn::Load(kTag, sums.m + l));
    const Vec c = before == nullptr ? none : hn::Load(kTag, before->c + l);
    // Masses against the larger reference. Divided by their own sum, not by 2^c: c is rounded, and
    // where it is large, that would not make averages.
    const Vec top = hn::IfThenElse(hn::Gt(m, c), m, c);  // c where it is NaN
    const auto empty = hn::Eq(top, none);
    const Vec old_mass = hn::IfThenZeroElse(empty, exp2(hn::Sub(c, top)));
    const Vec weight = hn::IfThenZeroElse(empty, exp2(hn::Sub(m, top)));
    const Vec total = hn::MulAdd(weight, s, old_mass);
    const Vec inverse = hn::IfThenZeroElse(empty, hn::Div(hn::Set(kTag, 1.0F), total));
    hn::Store(hn::Mul(old_mass, inverse), kTag, keep + l);
    hn::Store(hn::Mul(weight, inverse), kTag, add + l);
    hn::Store(top, kTag, high + l);
    hn::Store(total, kTag, mass + l);
  }
  const float unscale = 1 / *sums.value_scale;
  for (std::int64_t l = 0; l < dims.dp; ++l) {
    out.c[l] = high[l] == kNegInf ? kNegInf : high[l] + std::log2(mass[l]);
    const Vec old_share = hn::Set(kTag, keep[l]);
    const Vec share = hn::Set(kTag, add[l] * unscale);
    for (std::int64_t e = l * dims.dvp; e < (l + 1) * dims.dvp; e += kLanes) {
      Vec x = hn::Zero(kTag);
      if (l < dims.d) x = hn::Mul(share, hn::Load(kTag, sums.a + e));
      if (before != nullptr) x = hn::MulAdd(old_share, hn::Load(kTag, before->values + e), x);
      hn::Store(x, kTag, out.values + e);
    }
  }
}

// w = 2^(a + c - high) for the rows of a tile, with high[row] the row's maximum and sum[row] the
// sum of its weights (both with room for padded(count)); w may be a.
HWY_NOINLINE inline void channel_weights(std::int64_t count, const Dims& dims, const float* a,
                                         const float* HWY_RESTRICT c, float* w,
                                         float* HWY_RESTRICT high, float* HWY_RESTRICT sum) {
  RowVectors partial;
  const std::int64_t dp = dims.dp;
  for (std::int64_t i = 0; i < count; ++i) {
    Vec top = hn::Set(kTag, kLowest);
    for (std::int64_t l = 0; l < dp; l += kLanes) {
      const Vec x = hn::Add(hn::Load(kTag, a + i * dp + l), hn::Load(kTag, c + l));
      top = hn::Max(top, x);
      hn::Store(x, kTag, w + i * dp + l);
    }
    partial.set(i, top);
  }
  partial.max(count, high);
  for (std::int64_t i = 0; i < count; ++i) {
    const Vec shift = hn::Set(kTag, high[i]);
    Vec total = hn::Zero(kTag);
    for (std::int64_t l = 0; l < dp; l += kLanes) {
      const Vec e = exp2(hn::Sub(hn::Load(kTag, w + i * dp + l), shift));
      total = hn::Add(total, e);
      hn::Store(e, kTag, w + i * dp + l);
    }
    partial.set(i, total);
  }
  partial.sum(count, sum);
}

// out = c - max(c), and whether that can be done: there are keys, and c is far from the limits.
HWY_INLINE bool shift_channels(const Dims& dims, const float* c, float* out) {
  float high = kNegInf;
  for (std::int64_t l = 0; l < dims.d; ++l) high = std::max(high, c[l]);
  for (std::int64_t l = 0; l < dims.dp; ++l) out[l] = c[l] - high;
  return std::abs(high) < kLargestReference;
}

// 1 / sum, or 0 where the sum is 0 (a row without keys).
HWY_INLINE void invert_sums(std::int64_t count, float* sum) {
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const Vec s = hn::Load(kTag, sum + i);
    const Vec inverse = hn::Div(hn::Set(kTag, 1.0F), s);
    hn::Store(hn::IfThenZeroElse(hn::Eq(s, hn::Zero(kTag)), inverse), kTag, sum + i);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#endif
