// Small dense products on f32 tiles that lie in cache: register-blocked outer products. Every
// element is one chain of multiply-adds over k in order, whatever the blocking, so that a
// row's result does not depend on the rows beside it.
// SPDX-License-Identifier: Apache-2.0
#if defined(LLN_CPU_GEMM_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LLN_CPU_GEMM_INL_H_
#undef LLN_CPU_GEMM_INL_H_
#else
#define LLN_CPU_GEMM_INL_H_
#endif

#include "cpu/vector_math-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {

// 32 vector registers: 6 x 4 accumulators, 4 of b, 1 of a. 16 registers: 6 x 2, 2 and 1.
constexpr std::int64_t kTileRows = 6;
constexpr std::int64_t kTileVectors = HWY_TARGET == HWY_AVX3 ? 4 : 2;

// The left operand: a(m, k) = data[m * row + k * column], so that a transpose costs nothing.
struct Left {
  const float* data;
  std::int64_t row;
  std::int64_t column;
};

template <std::int64_t kM, std::int64_t kV>
HWY_INLINE void gemm_tile(std::int64_t k, const Left& a, const float* HWY_RESTRICT b,
                          std::int64_t ldb, float* HWY_RESTRICT out, std::int64_t ldo,
                          bool accumulate) {
  Vec acc[kM][kV];
  HWY_UNROLL(8)
  for (std::int64_t i = 0; i < kM; ++i) {
    HWY_UNROLL(8)
    for (std::int64_t j = 0; j < kV; ++j) {
      acc[i][j] = accumulate ? hn::Load(kTag, out + i * ldo + j * kLanes) : hn::Zero(kTag);
    }
  }
  const float* a_k = a.data;
  for (std::int64_t p = 0; p < k; ++p, a_k += a.column, b += ldb) {
    Vec b_p[kV];
    HWY_UNROLL(8)
    for (std::int64_t j = 0; j < kV; ++j) b_p[j] = hn::Load(kTag, b + j * kLanes);
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
    for (std::int64_t j = 0; j < kV; ++j) hn::Store(acc[i][j], kTag, out + i * ldo + j * kLanes);
  }
}

template <std::int64_t kV>
HWY_INLINE void gemm_columns(std::int64_t m, std::int64_t k, Left a, const float* b,
                             std::int64_t ldb, float* out, std::int64_t ldo, bool accumulate) {
  for (; m >= kTileRows; m -= kTileRows) {
    gemm_tile<kTileRows, kV>(k, a, b, ldb, out, ldo, accumulate);
    a.data += kTileRows * a.row;
    out += kTileRows * ldo;
  }
  switch (m) {
    case 5:
      return gemm_tile<5, kV>(k, a, b, ldb, out, ldo, accumulate);
    case 4:
      return gemm_tile<4, kV>(k, a, b, ldb, out, ldo, accumulate);
    case 3:
      return gemm_tile<3, kV>(k, a, b, ldb, out, ldo, accumulate);
    case 2:
      return gemm_tile<2, kV>(k, a, b, ldb, out, ldo, accumulate);
    case 1:
      return gemm_tile<1, kV>(k, a, b, ldb, out, ldo, accumulate);
    default:
      return;
  }
}

// out[m, n] = (accumulate ? out : 0) + a[m, k] b[k, n]; n is a multiple of kPad.
HWY_NOINLINE inline void gemm(std::int64_t m, std::int64_t n, std::int64_t k, Left a,
                              const float* b, std::int64_t ldb, float* out, std::int64_t ldo,
                              bool accumulate) {
  std::int64_t vectors = n / kLanes;
  while (vectors >= kTileVectors) {
    gemm_columns<kTileVectors>(m, k, a, b, ldb, out, ldo, accumulate);
    b += kTileVectors * kLanes;
    out += kTileVectors * kLanes;
    vectors -= kTileVectors;
  }
  if constexpr (kTileVectors == 4) {
    if (vectors == 3) gemm_columns<3>(m, k, a, b, ldb, out, ldo, accumulate);
    if (vectors == 2) gemm_columns<2>(m, k, a, b, ldb, out, ldo, accumulate);
  }
  if (vectors == 1) gemm_columns<1>(m, k, a, b, ldb, out, ldo, accumulate);
}

// The same with rows of `a` that are rows of a tile, or columns of it.
HWY_INLINE Left by_rows(const float* data, std::int64_t ld) { return {data, ld, 1}; }
HWY_INLINE Left by_columns(const float* data, std::int64_t ld) { return {data, 1, ld}; }

// Sums of values near the largest f32 overflow although their average does not. From the first tile
// on that holds a magnitude above kLargeValue, values are scaled by kSmallScale in such sums: 2^32
// weights of up to 1 then fit. Ordinary values are not scaled, since small ones would be flushed.
constexpr float kLargeValue = 0x1p90F;
constexpr float kSmallScale = 0x1p-40F;

HWY_INLINE void scale_row(float* row, std::int64_t width, float factor) {
  const Vec f = hn::Set(kTag, factor);
  for (std::int64_t c = 0; c < width; c += kLanes) {
    hn::Store(hn::Mul(hn::Load(kTag, row + c), f), kTag, row + c);
  }
}

// The largest magnitude in a tile, NaN passed over; `count` is a multiple of kPad.
HWY_INLINE float largest_magnitude(const float* tile, std::int64_t count) {
  Vec largest = hn::Zero(kTag);
  for (std::int64_t i = 0; i < count; i += kLanes) {
    largest = hn::Max(hn::Abs(hn::Load(kTag, tile + i)), largest);
  }
  return reduce_max(largest);
}

// Whether a tile holds neither infinity nor NaN; `count` is a multiple of kPad.
HWY_INLINE bool all_finite(const float* tile, std::int64_t count) {
  const Vec zero = hn::Zero(kTag);
  Vec sum = zero;  // 0 * x is NaN for the others
  for (std::int64_t i = 0; i < count; i += kLanes) {
    sum = hn::MulAdd(zero, hn::Load(kTag, tile + i), sum);
  }
  return hn::AllTrue(kTag, hn::Eq(sum, zero));
}

// dst[c, r] = src[r, c] in blocks of 4 x 4: up to 3 rows more than `rows` are read and written
// (both tiles have room for them); `columns` is a multiple of 4.
HWY_INLINE void transpose(const float* HWY_RESTRICT src, std::int64_t lds, std::int64_t rows,
                          std::int64_t columns, float* HWY_RESTRICT dst, std::int64_t ldd) {
#if HWY_TARGET == HWY_SCALAR
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) dst[c * ldd + r] = src[r * lds + c];
  }
#else
  const hn::FixedTag<float, 4> d4;
  for (std::int64_t r = 0; r < rows; r += 4) {
    for (std::int64_t c = 0; c < columns; c += 4) {
      const float* const s = src + r * lds + c;
      const auto r0 = hn::Load(d4, s);
      const auto r1 = hn::Load(d4, s + lds);
      const auto r2 = hn::Load(d4, s + 2 * lds);
      const auto r3 = hn::Load(d4, s + 3 * lds);
      const auto low01 = hn::InterleaveLower(d4, r0, r1);
      const auto low23 = hn::InterleaveLower(d4, r2, r3);
      const auto high01 = hn::InterleaveUpper(d4, r0, r1);
      const auto high23 = hn::InterleaveUpper(d4, r2, r3);
      float* const t = dst + c * ldd + r;
      hn::Store(hn::ConcatLowerLower(d4, low23, low01), d4, t);
      hn::Store(hn::ConcatUpperUpper(d4, low23, low01), d4, t + ldd);
      hn::Store(hn::ConcatLowerLower(d4, high23, high01), d4, t + 2 * ldd);
      hn::Store(hn::ConcatUpperUpper(d4, high23, high01), d4, t + 3 * ldd);
    }
  }
#endif
}

// One vector for each row of a tile, to be reduced over its lanes. Reducing many rows together has
// no chain of dependent shuffles, which would cost more than the arithmetic of a row.
struct RowVectors {
  HWY_ALIGN float lanes[kMaxChunk * kLanes];  // [rows, lanes]

  HWY_INLINE void set(std::int64_t row, Vec v) { hn::Store(v, kTag, lanes + row * kLanes); }

  // out[row] = combination of the row's lanes; up to kPad - 1 entries more than `rows` are written.
  template <class Combine>
  HWY_INLINE void reduce(std::int64_t rows, float* HWY_RESTRICT out, Combine&& combine) const {
    if constexpr (kLanes == 1) {
      std::copy(lanes, lanes + rows, out);
    } else {
      const std::int64_t ld = padded(rows);
      HWY_ALIGN float turned[kMaxChunk * kLanes];  // [lanes, rows]
      transpose(lanes, kLanes, rows, kLanes, turned, ld);
      for (std::int64_t i = 0; i < ld; i += kLanes) {
        Vec total = hn::Load(kTag, turned + i);
        for (std::int64_t l = 1; l < kLanes; ++l) {
          total = combine(total, hn::Load(kTag, turned + l * ld + i));
        }
        hn::Store(total, kTag, out + i);
      }
    }
  }
  HWY_INLINE void sum(std::int64_t rows, float* out) const {
    reduce(rows, out, [](Vec a, Vec b) HWY_ATTR { return hn::Add(a, b); });
  }
  HWY_INLINE void max(std::int64_t rows, float* out) const {
    reduce(rows, out, [](Vec a, Vec b) HWY_ATTR { return hn::Max(a, b); });
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#endif
