// Backward of bidirectional LLN for a chunk of rows and for a chunk of keys (docs/theory.md): two
// products each, and between them one pass over the tile that stores straight to the caller's rows
// where these are f32.
// SPDX-License-Identifier: Apache-2.0
#if defined(LLN_CPU_LLN_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LLN_CPU_LLN_BACKWARD_INL_H_
#undef LLN_CPU_LLN_BACKWARD_INL_H_
#else
#define LLN_CPU_LLN_BACKWARD_INL_H_
#endif

#include "cpu/head-inl.h"
#include "cpu/layout.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {

// w becomes the probabilities factor[row] * w; dot[row] = their product with dw. Room for
// padded(count) in `dot`.
HWY_NOINLINE inline void normalise_and_dot(std::int64_t count, const Dims& dims,
                                           float* HWY_RESTRICT w, const float* HWY_RESTRICT dw,
                                           const float* HWY_RESTRICT factor,
                                           float* HWY_RESTRICT dot) {
  const std::int64_t width = whole_vectors(dims.d);
  RowVectors partial;
  for (std::int64_t i = 0; i < count; ++i) {
    const Vec f = hn::Set(kTag, factor[i]);
    Vec sum = hn::Zero(kTag);
    for (std::int64_t l = 0; l < width; l += kLanes) {
      const Vec p = hn::Mul(f, hn::Load(kTag, w + i * dims.dp + l));
      hn::Store(p, kTag, w + i * dims.dp + l);
      sum = hn::MulAdd(p, hn::Load(kTag, dw + i * dims.dp + l), sum);
    }
    partial.set(i, sum);
  }
  partial.sum(count, dot);
}

// How gradients of exponents become gradients of q or k: out = scale * slope * x, for x = w (dw -
// shift).
struct ExponentGradient {
  const float* slope;  // [rows, dp] f' of the feature map; null: 1
  const float* raw;    // [rows, dp] q or k, where the sum of slope * x * raw is wanted
  float scale;         // alpha or beta
  float* out;          // [rows]
  std::int64_t ld;     // of `out`
  std::int64_t width;  // channels of `out`

  void go_to(const Rows& rows, std::int64_t first) {
    out = floats_of(rows, first);
    ld = leading_dim(rows);
    width = rows.width;
  }

  // One vector of x; `at` is its channel.
  HWY_INLINE void store(std::int64_t row, std::int64_t at, std::int64_t dp, Vec x, Vec factor,
                        Vec& raw_sum) const {
    if (slope != nullptr) x = hn::Mul(x, hn::Load(kTag, slope + row * dp + at));
    if (raw != nullptr) raw_sum = hn::MulAdd(x, hn::Load(kTag, raw + row * dp + at), raw_sum);
    hn::StoreU(hn::Mul(x, factor), kTag, out + row * ld + at);
  }
};

template <std::int64_t kVectors>
HWY_INLINE void row_gradient_group(std::int64_t count, std::int64_t dp, std::int64_t c,
                                   float* HWY_RESTRICT w, const float* HWY_RESTRICT dw,
                                   const float* HWY_RESTRICT delta, const float* weight,
                                   const ExponentGradient& gradient, float* HWY_RESTRICT t,
                                   Vec& raw_sum) {
  const Vec scale = hn::Set(kTag, gradient.scale);
  Vec total[kVectors];
  HWY_UNROLL(4)
  for (std::int64_t j = 0; j < kVectors; ++j) total[j] = hn::Load(kTag, t + c + j * kLanes);
  for (std::int64_t i = 0; i < count; ++i) {
    const Vec shift = hn::Set(kTag, delta[i]);
    HWY_UNROLL(4)
    for (std::int64_t j = 0; j < kVectors; ++j) {
      const std::int64_t at = c + j * kLanes;
      Vec p = hn::Load(kTag, w + i * dp + at);
      if (weight != nullptr) {
        p = hn::Mul(p, hn::Set(kTag, weight[i]));
        hn::Store(p, kTag, w + i * dp + at);
      }
      const Vec x = hn::Mul(p, hn::Sub(hn::Load(kTag, dw + i * dp + at), shift));
      gradient.store(i, at, dp, x, scale, raw_sum);
      total[j] = hn::MulAdd(p, shift, total[j]);
    }
  }
  HWY_UNROLL(4)
  for (std::int64_t j = 0; j < kVectors; ++j) hn::Store(total[j], kTag, t + c + j * kLanes);
}

// Rows: x = weight w (dw - delta), with delta and (where given) a weight for each row; t += the sum
// over rows of weight w delta, and w is left multiplied with the weight. Returns the sum that
// gradient.raw asks for.
HWY_NOINLINE inline float row_gradient(std::int64_t count, std::int64_t dp, float* w,
                                       const float* dw, const float* delta, const float* weight,
                                       const ExponentGradient& gradient, float* t) {
  Vec raw_sum = hn::Zero(kTag);
  for_column_groups(gradient.width, [&](auto vectors, std::int64_t c) HWY_ATTR {
    row_gradient_group<vectors()>(count, dp, c, w, dw, delta, weight, gradient, t, raw_sum);
  });
  return gradient.raw == nullptr ? 0.0F : reduce_sum(raw_sum);
}

template <std::int64_t kVectors>
HWY_INLINE void key_gradient_group(std::int64_t count, std::int64_t dp, std::int64_t c,
                                   const float* HWY_RESTRICT w, const float* HWY_RESTRICT dw,
                                   const float* HWY_RESTRICT t, const ExponentGradient& gradient,
                                   Vec& raw_sum) {
  const Vec scale = hn::Set(kTag, gradient.scale);
  Vec shift[kVectors];
  HWY_UNROLL(4)
  for (std::int64_t j = 0; j < kVectors; ++j) shift[j] = hn::Load(kTag, t + c + j * kLanes);
  for (std::int64_t i = 0; i < count; ++i) {
    HWY_UNROLL(4)
    for (std::int64_t j = 0; j < kVectors; ++j) {
      const std::int64_t at = c + j * kLanes;
      const Vec x = hn::Mul(hn::Load(kTag, w + i * dp + at),
                            hn::Sub(hn::Load(kTag, dw + i * dp + at), shift[j]));
      gradient.store(i, at, dp, x, scale, raw_sum);
    }
  }
}

// Keys: x = w (dw - t). Returns the sum that gradient.raw asks for.
HWY_NOINLINE inline float key_gradient(std::int64_t count, std::int64_t dp, const float* w,
                                       const float* dw, const float* t,
                                       const ExponentGradient& gradient) {
  Vec raw_sum = hn::Zero(kTag);
  for_column_groups(gradient.width, [&](auto vectors, std::int64_t c) HWY_ATTR {
    key_gradient_group<vectors()>(count, dp, c, w, dw, t, gradient, raw_sum);
  });
  return gradient.raw == nullptr ? 0.0F : reduce_sum(raw_sum);
}

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#endif
