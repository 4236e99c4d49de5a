// Small dense products on tiles that lie in cache: register-blocked outer products of f32, or of
// pairs of bf16 (pairs-inl.h). Every element is one chain of multiply-adds over k in order,
// whatever the blocking, so that a row's result does not depend on the rows beside it.
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
// A line of the next tile is asked for in every so many steps of a product: faster, and more lines
// wait for memory than the first-level cache can keep track of (docs/kernels.md).
constexpr std::int64_t kStepsPerLine = 2;

// The left operand: a(m, k) = data[m * row + k * column], so that a transpose costs nothing.
struct Left {
  const float* data;
  std::int64_t row;
  std::int64_t column;
};

// Rows of f32 that a product can read: the caller's or a tile's.
struct Operand {
  const float* data;
  std::int64_t ld;
  std::int64_t width;  // in whole vectors
};

// Rows that the next tile will need, brought into the cache while a product runs: a line in every
// step of it. Memory and arithmetic then overlap, which the hardware's own prefetching does not
// achieve, because nothing is loaded from memory while a product runs.
class Ahead {
 public:
  struct Stream {
    const std::byte* at = nullptr;
    std::int64_t row_lines = 0;  // cache lines of a row
    std::int64_t jump = 0;       // bytes from the end of these to the next row
    std::int64_t rows = 0;
  };
  static constexpr std::int64_t kLine = 64;

  Ahead() = default;
  Ahead(const Stream& first, const Stream& second)
      : now_(first), line_(first.row_lines), second_(second) {}

  template <int kCount>
  HWY_INLINE void fetch_lines() {
    fetch_line();
    if constexpr (kCount > 1) fetch_lines<kCount - 1>();
  }
  HWY_INLINE void fetch_line() {
    if (now_.rows == 0) return;
    __builtin_prefetch(now_.at, 0, 2);
    now_.at += kLine;
    if (--line_ > 0) return;
    now_.at += now_.jump;
    if (--now_.rows == 0) {
      now_ = second_;
      second_.rows = 0;
    }
    line_ = now_.row_lines;
  }

 private:
  Stream now_;
  std::int64_t line_ = 0;  // lines left in this row
  Stream second_;
};

// Where a product goes: out = factor * (a b), or what was there plus that. It and the right operand
// may be rows of the caller's tensors, so they need no alignment.
struct Product {
  float* out;
  std::int64_t ld;
  bool accumulate = false;
  const float* row_factor = nullptr;  // one per row; null: 1

  // Rows from `row` on.
  Product below(std::int64_t row) const {
    return {out + row * ld, ld, accumulate, row_factor == nullptr ? nullptr : row_factor + row};
  }
};

// The 32-bit words of operands: numbers, which a product multiplies and adds.
struct Floats {
  static constexpr std::int64_t kPerWord = 1;

  static HWY_INLINE Vec multiply_add(Vec a, Vec b, Vec sum) { return hn::MulAdd(a, b, sum); }
  // The numbers that words of x hold.
  static HWY_INLINE Vec rounded(Vec x) { return x; }
  // Numbers that are summed over one after the other as words.
  static HWY_INLINE Vec join_rounded(const Vec (&x)[1]) { return x[0]; }
  // Neighbouring numbers as words.
  static HWY_INLINE void store(Vec x, float* words) { hn::Store(x, kTag, words); }
};

template <class Words, std::int64_t kM, std::int64_t kV>
HWY_INLINE void gemm_tile(std::int64_t k, const Left& a, const float* HWY_RESTRICT b,
                          std::int64_t ldb, const Product& c, Ahead* shared_ahead) {
  Ahead ahead = *shared_ahead;  // in registers inside the loop
  float* HWY_RESTRICT const out = c.out;
  const std::int64_t ldo = c.ld;
  const bool add_to_out = c.accumulate && c.row_factor == nullptr;
  Vec acc[kM][kV];
  HWY_UNROLL(8)
  for (std::int64_t i = 0; i < kM; ++i) {
    HWY_UNROLL(8)
    for (std::int64_t j = 0; j < kV; ++j) {
      acc[i][j] = add_to_out ? hn::LoadU(kTag, out + i * ldo + j * kLanes) : hn::Zero(kTag);
    }
  }
  const float* a_k = a.data;
  for (std::int64_t p = 0; p < k; ++p, a_k += a.column, b += ldb) {
    if (p % kStepsPerLine == 0) ahead.fetch_line();
    Vec b_p[kV];
    HWY_UNROLL(8)
    for (std::int64_t j = 0; j < kV; ++j) b_p[j] = hn::LoadU(kTag, b + j * kLanes);
    HWY_UNROLL(8)
    for (std::int64_t i = 0; i < kM; ++i) {
      const Vec a_ip = hn::Set(kTag, a_k[i * a.row]);
      HWY_UNROLL(8)
      for (std::int64_t j = 0; j < kV; ++j)
        acc[i][j] = Words::multiply_add(a_ip, b_p[j], acc[i][j]);
    }
  }
  *shared_ahead = ahead;
  if (c.row_factor != nullptr) {
    HWY_UNROLL(8)
    for (std::int64_t i = 0; i < kM; ++i) {
      const Vec factor = hn::Set(kTag, c.row_factor[i]);
      HWY_UNROLL(8)
      for (std::int64_t j = 0; j < kV; ++j) {
        acc[i][j] = c.accumulate
                        ? hn::MulAdd(acc[i][j], factor, hn::LoadU(kTag, out + i * ldo + j * kLanes))
                        : hn::Mul(acc[i][j], factor);
      }
    }
  }
  HWY_UNROLL(8)
  for (std::int64_t i = 0; i < kM; ++i) {
    HWY_UNROLL(8)
    for (std::int64_t j = 0; j < kV; ++j) hn::StoreU(acc[i][j], kTag, out + i * ldo + j * kLanes);
  }
}

template <class Words, std::int64_t kV>
HWY_INLINE void gemm_columns(std::int64_t m, std::int64_t k, Left a, const float* b,
                             std::int64_t ldb, Product c, Ahead* ahead) {
  for (; m >= kTileRows; m -= kTileRows) {
    gemm_tile<Words, kTileRows, kV>(k, a, b, ldb, c, ahead);
    a.data += kTileRows * a.row;
    c = c.below(kTileRows);
  }
  switch (m) {
    case 5:
      return gemm_tile<Words, 5, kV>(k, a, b, ldb, c, ahead);
    case 4:
      return gemm_tile<Words, 4, kV>(k, a, b, ldb, c, ahead);
    case 3:
      return gemm_tile<Words, 3, kV>(k, a, b, ldb, c, ahead);
    case 2:
      return gemm_tile<Words, 2, kV>(k, a, b, ldb, c, ahead);
    case 1:
      return gemm_tile<Words, 1, kV>(k, a, b, ldb, c, ahead);
    default:
      return;
  }
}

// c[m, n] = a[m, k] b[k, n]; n is a multiple of kLanes.
template <class Words = Floats>
HWY_NOINLINE void gemm(std::int64_t m, std::int64_t n, std::int64_t k, Left a, const float* b,
                       std::int64_t ldb, Product c, Ahead* ahead) {
  std::int64_t vectors = n / kLanes;
  while (vectors >= kTileVectors) {
    gemm_columns<Words, kTileVectors>(m, k, a, b, ldb, c, ahead);
    b += kTileVectors * kLanes;
    c.out += kTileVectors * kLanes;
    vectors -= kTileVectors;
  }
  if constexpr (kTileVectors == 4) {
    if (vectors == 3) gemm_columns<Words, 3>(m, k, a, b, ldb, c, ahead);
    if (vectors == 2) gemm_columns<Words, 2>(m, k, a, b, ldb, c, ahead);
  }
  if (vectors == 1) gemm_columns<Words, 1>(m, k, a, b, ldb, c, ahead);
}

template <class Words = Floats>
HWY_INLINE void gemm(std::int64_t m, std::int64_t n, std::int64_t k, Left a, const float* b,
                     std::int64_t ldb, const Product& c) {
  Ahead nothing;
  gemm<Words>(m, n, k, a, b, ldb, c, &nothing);
}

HWY_INLINE void gemm(std::int64_t m, std::int64_t n, std::int64_t k, Left a, const float* b,
                     std::int64_t ldb, float* out, std::int64_t ldo, bool accumulate) {
  gemm(m, n, k, a, b, ldb, Product{out, ldo, accumulate});
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

// Whether all magnitudes of rows [rows, width] are at most `limit`; those of NaN are not. Minimum
// and maximum would not do: they pass over NaN. `width` is a multiple of kLanes.
HWY_INLINE bool all_within(const float* data, std::int64_t ld, std::int64_t rows,
                           std::int64_t width, float limit) {
  const Vec most = hn::Set(kTag, limit);
  auto inside = hn::FirstN(kTag, static_cast<std::size_t>(kLanes));
  for (std::int64_t i = 0; i < rows; ++i) {
    for (std::int64_t c = 0; c < width; c += kLanes) {
      inside = hn::And(inside, hn::Le(hn::Abs(hn::LoadU(kTag, data + i * ld + c)), most));
    }
  }
  return hn::AllTrue(kTag, inside);
}
HWY_INLINE bool all_within(const float* data, std::int64_t count, float limit) {
  return all_within(data, count, 1, count, limit);
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

// dst[c, r] = src[r, c] for 4 rows at a time: up to 3 rows more than `rows` are read and written
// (both tiles have room for them); `columns` is a multiple of 8. `src` needs no alignment.
HWY_NOINLINE inline void transpose(const float* HWY_RESTRICT src, std::int64_t lds,
                                   std::int64_t rows, std::int64_t columns, float* HWY_RESTRICT dst,
                                   std::int64_t ldd) {
#if HWY_TARGET == HWY_SCALAR
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < columns; ++c) dst[c * ldd + r] = src[r * lds + c];
  }
#else
  // Eight columns at a time: pieces of wider vectors take longer to get at than to load.
  const hn::CappedTag<float, 8> d;
  const hn::Repartition<double, decltype(d)> d64;
  constexpr std::int64_t kWidth = hn::MaxLanes(d);
  const hn::FixedTag<float, 4> d4;
  for (std::int64_t r = 0; r < rows; r += 4) {
    for (std::int64_t c = 0; c < columns; c += kWidth) {
      const float* const s = src + r * lds + c;
      const auto r0 = hn::LoadU(d, s);
      const auto r1 = hn::LoadU(d, s + lds);
      const auto r2 = hn::LoadU(d, s + 2 * lds);
      const auto r3 = hn::LoadU(d, s + 3 * lds);
      // Inside every block of 4 columns: the columns, turned into vectors of 4 rows.
      const auto low01 = hn::BitCast(d64, hn::InterleaveLower(d, r0, r1));
      const auto low23 = hn::BitCast(d64, hn::InterleaveLower(d, r2, r3));
      const auto high01 = hn::BitCast(d64, hn::InterleaveUpper(d, r0, r1));
      const auto high23 = hn::BitCast(d64, hn::InterleaveUpper(d, r2, r3));
      HWY_ALIGN float turned[4][kWidth];
      hn::Store(hn::BitCast(d, hn::InterleaveLower(d64, low01, low23)), d, turned[0]);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(d64, low01, low23)), d, turned[1]);
      hn::Store(hn::BitCast(d, hn::InterleaveLower(d64, high01, high23)), d, turned[2]);
      hn::Store(hn::BitCast(d, hn::InterleaveUpper(d64, high01, high23)), d, turned[3]);
      float* const t = dst + c * ldd + r;
      for (std::int64_t block = 0; block < kWidth; block += 4) {
        HWY_UNROLL(4)
        for (std::int64_t j = 0; j < 4; ++j) {
          hn::Store(hn::Load(d4, turned[j] + block), d4, t + (block + j) * ldd);
        }
      }
    }
  }
#endif
}

// One vector for each row of a tile, to be reduced over its lanes. Reducing as many rows as there
// are lanes together takes three instructions a row and no chain of dependent shuffles, which would
// cost more than the arithmetic of a row.
struct RowVectors {
  HWY_ALIGN float lanes[kMaxChunk * kLanes];  // [rows, lanes]

  HWY_INLINE void set(std::int64_t row, Vec v) { hn::Store(v, kTag, lanes + row * kLanes); }
  HWY_INLINE Vec get(std::int64_t row) const { return hn::Load(kTag, lanes + row * kLanes); }

  // out[row] = combination of the row's lanes; up to kPad - 1 entries more than `rows` are written.
  template <class Combine>
  HWY_INLINE void reduce(std::int64_t rows, float* HWY_RESTRICT out, Combine&& combine) const {
    for (std::int64_t i = 0; i < rows; i += kLanes) {
      hn::Store(fold<kLanes>(lanes + i * kLanes, combine), kTag, out + i);
    }
  }
  HWY_INLINE void sum(std::int64_t rows, float* out) const {
    reduce(rows, out, [](Vec a, Vec b) HWY_ATTR { return hn::Add(a, b); });
  }
  HWY_INLINE void max(std::int64_t rows, float* out) const {
    reduce(rows, out, [](Vec a, Vec b) HWY_ATTR { return hn::Max(a, b); });
  }

 private:
  // kRows rows side by side, each folded to kLanes / kRows lanes: neighbours are combined, level
  // by level, until a row is one lane.
  template <std::int64_t kRows, class Combine>
  static HWY_INLINE Vec fold(const float* HWY_RESTRICT first, [[maybe_unused]] Combine&& combine) {
#if HWY_TARGET != HWY_SCALAR
    if constexpr (kRows > 1) {
      const Vec low = fold<kRows / 2>(first, combine);
      const Vec high = fold<kRows / 2>(first + kRows / 2 * kLanes, combine);
      return combine(hn::ConcatEven(kTag, high, low), hn::ConcatOdd(kTag, high, low));
    }
#endif
    return hn::Load(kTag, first);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#endif
