// The exponentials of LLN taken straight from rows of q or k, one pass over a tile: scale, shift,
// 2^x, sums. The passes are optimistic: they take it for granted that the shift keeps exponents in
// the range of f32, and report what the caller needs to see whether it did. Nearly always it did;
// otherwise the careful functions of lln-inl.h do the tile again.
// SPDX-License-Identifier: Apache-2.0
#if defined(LLN_CPU_EXPONENTIALS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LLN_CPU_EXPONENTIALS_INL_H_
#undef LLN_CPU_EXPONENTIALS_INL_H_
#else
#define LLN_CPU_EXPONENTIALS_INL_H_
#endif

#include "cpu/pairs-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {

// Rows of exponents: scale * x, in units of log2. Either the caller's tensor or a tile.
struct Exponents {
  ConstRows rows;
  float scale;
};

// The exponents of q or k under the exponential are the rows themselves.
HWY_INLINE bool are_exponents(const ConstRows& rows, Feature feature) {
  return feature == Feature::exp && rows.width % kLanes == 0;
}

// Calls body(vectors, column) for groups of at most 4 vectors that cover `width` channels; the
// number of vectors is a constant, so that a group's sums stay in registers.
template <class Body>
HWY_INLINE void for_column_groups(std::int64_t width, Body&& body) {
  std::int64_t c = 0;
  for (; c + 4 * kLanes <= width; c += 4 * kLanes) {
    body(std::integral_constant<std::int64_t, 4>{}, c);
  }
  switch ((width - c) / kLanes) {
    case 3:
      return body(std::integral_constant<std::int64_t, 3>{}, c);
    case 2:
      return body(std::integral_constant<std::int64_t, 2>{}, c);
    case 1:
      return body(std::integral_constant<std::int64_t, 1>{}, c);
    default:
      return;
  }
}

// Cache lines of the next tile that are asked for beside each row (and group) of this one. With the
// lines that products ask for (gemm-inl.h) a tile of 64 channels is there in time; docs/kernels.md
// has what was measured.
constexpr int kLinesPerRow = 3;

template <DType kType, std::int64_t kVectors>
HWY_INLINE void highest_in_group(const Exponents& u, std::int64_t count, Tokens token,
                                 std::int64_t c, float* HWY_RESTRICT high) {
  const Vec scale = hn::Set(kTag, u.scale);
  Vec top[kVectors];
  HWY_UNROLL(4)
  for (std::int64_t j = 0; j < kVectors; ++j) top[j] = hn::Set(kTag, kLowest);
  for (std::int64_t i = 0; i < count; ++i) {
    const std::byte* const row = u.rows.row(token(i)) + c * bytes_of<kType>();
    HWY_UNROLL(4)
    for (std::int64_t j = 0; j < kVectors; ++j) {
      const Vec x = load_lanes<kType>(row + j * kLanes * bytes_of<kType>());
      top[j] = hn::Max(top[j], hn::Mul(x, scale));
    }
  }
  HWY_UNROLL(4)
  for (std::int64_t j = 0; j < kVectors; ++j) hn::Store(top[j], kTag, high + c + j * kLanes);
}

// high[l] = the largest exponent of channel l.
HWY_NOINLINE inline void highest_exponents(const Exponents& u, std::int64_t count, Tokens token,
                                           float* HWY_RESTRICT high) {
  with_type(u.rows.dtype, [&](auto type) HWY_ATTR {
    for_column_groups(u.rows.width, [&](auto vectors, std::int64_t c) HWY_ATTR {
      highest_in_group<type(), vectors()>(u, count, token, c, high);
    });
  });
}

template <class Words, DType kType, std::int64_t kVectors>
HWY_INLINE void weigh_key_group(const Exponents& u, std::int64_t count, Tokens token,
                                std::int64_t c, const float* HWY_RESTRICT m,
                                float* HWY_RESTRICT weights, std::int64_t ld,
                                float* HWY_RESTRICT sum, Ahead& shared_ahead) {
  Ahead ahead = shared_ahead;
  const Vec scale = hn::Set(kTag, u.scale);
  Vec shift[kVectors], total[kVectors];
  HWY_UNROLL(4)
  for (std::int64_t j = 0; j < kVectors; ++j) {
    shift[j] = hn::Load(kTag, m + c + j * kLanes);
    total[j] = hn::Zero(kTag);
  }
  constexpr std::int64_t kRows = Words::kPerWord;
  for (std::int64_t i = 0; i < count; i += kRows, weights += ld) {
    ahead.fetch_lines<kRows * kLinesPerRow>();
    HWY_UNROLL(4)
    for (std::int64_t j = 0; j < kVectors; ++j) {
      Vec e[kRows];
      HWY_UNROLL(2)
      for (std::int64_t r = 0; r < kRows; ++r) {
        if (r > 0 && i + r == count) {
          e[r] = hn::Zero(kTag);
          continue;
        }
        const std::byte* const row = u.rows.row(token(i + r)) + c * bytes_of<kType>();
        const Vec x = load_lanes<kType>(row + j * kLanes * bytes_of<kType>());
        e[r] = Words::rounded(exp2(hn::MulSub(x, scale, shift[j])));
        total[j] = hn::Add(total[j], e[r]);
      }
      hn::Store(Words::join_rounded(e), kTag, weights + c + j * kLanes);
    }
  }
  HWY_UNROLL(4)
  for (std::int64_t j = 0; j < kVectors; ++j) hn::Store(total[j], kTag, sum + c + j * kLanes);
  shared_ahead = ahead;
}

// weights[i, l] = 2^(u_il - m_l), sum[l] their sum over the tile: inf where a weight overflowed.
// Words of several numbers hold as many keys.
template <class Words = Floats>
HWY_NOINLINE void weigh_keys(const Exponents& u, std::int64_t count, Tokens token,
                             const float* HWY_RESTRICT m, float* HWY_RESTRICT weights,
                             std::int64_t ld, float* HWY_RESTRICT sum, Ahead& ahead) {
  with_type(u.rows.dtype, [&](auto type) HWY_ATTR {
    for_column_groups(u.rows.width, [&](auto vectors, std::int64_t c) HWY_ATTR {
      weigh_key_group<Words, type(), vectors()>(u, count, token, c, m, weights, ld, sum, ahead);
    });
  });
}

// `mass` null: only the weights' own sums.
template <class Words, DType kType, std::int64_t kVectors, bool kMass>
HWY_INLINE void weigh_row_group(const Exponents& a, std::int64_t first, std::int64_t count,
                                std::int64_t column, const float* HWY_RESTRICT c,
                                const float* HWY_RESTRICT mass, float* HWY_RESTRICT weights,
                                std::int64_t ld, RowVectors& sums, RowVectors& masses,
                                Ahead& shared_ahead) {
  Ahead ahead = shared_ahead;
  const Vec scale = hn::Set(kTag, a.scale);
  const Vec zero = hn::Zero(kTag);
  Vec shift[kVectors], share[kVectors];
  HWY_UNROLL(4)
  for (std::int64_t j = 0; j < kVectors; ++j) {
    shift[j] = hn::Load(kTag, c + column + j * kLanes);
    share[j] = kMass ? hn::Load(kTag, mass + column + j * kLanes) : zero;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    const std::byte* const row = a.rows.row(first + i) + column * bytes_of<kType>();
    ahead.fetch_lines<kLinesPerRow>();
    Vec e[kVectors];
    HWY_UNROLL(4)
    for (std::int64_t j = 0; j < kVectors; ++j) {
      const Vec x = load_lanes<kType>(row + j * kLanes * bytes_of<kType>());
      e[j] = Words::rounded(exp2(hn::MulAdd(x, scale, shift[j])));
      Words::store(e[j], weights + i * ld + (column + j * kLanes) / Words::kPerWord);
    }
    Vec sum = column == 0 ? zero : sums.get(i);
    HWY_UNROLL(4)
    for (std::int64_t j = 0; j < kVectors; ++j) sum = hn::Add(sum, e[j]);
    sums.set(i, sum);
    if constexpr (kMass) {
      Vec total = column == 0 ? zero : masses.get(i);
      HWY_UNROLL(4)
      for (std::int64_t j = 0; j < kVectors; ++j) total = hn::MulAdd(e[j], share[j], total);
      masses.set(i, total);
    }
  }
  shared_ahead = ahead;
}

template <class Words, bool kMass>
HWY_INLINE void weigh_all_rows(const Exponents& a, std::int64_t first, std::int64_t count,
                               const float* c, const float* mass, float* weights, std::int64_t ld,
                               RowVectors& sums, RowVectors& masses, Ahead& ahead) {
  with_type(a.rows.dtype, [&](auto type) HWY_ATTR {
    for_column_groups(a.rows.width, [&](auto vectors, std::int64_t column) HWY_ATTR {
      weigh_row_group<Words, type(), vectors(), kMass>(a, first, count, column, c, mass, weights,
                                                       ld, sums, masses, ahead);
    });
  });
}

// weights[i, l] = 2^(a_il + c_l) for the rows from `first` on, sum[i] their sum over the channels
// (room for padded(count)). Words of several numbers hold as many channels; `ld` counts words.
template <class Words = Floats>
HWY_NOINLINE void weigh_rows(const Exponents& a, std::int64_t first, std::int64_t count,
                             const float* c, float* weights, std::int64_t ld, float* sum,
                             Ahead& ahead) {
  RowVectors sums;
  weigh_all_rows<Words, false>(a, first, count, c, nullptr, weights, ld, sums, sums, ahead);
  sums.sum(count, sum);
}

// The same with row_mass[i] = the weights' product with the masses of the channels.
HWY_NOINLINE inline void weigh_rows(const Exponents& a, std::int64_t first, std::int64_t count,
                                    const float* c, const float* mass, float* weights,
                                    std::int64_t ld, float* sum, float* row_mass, Ahead& ahead) {
  RowVectors sums, masses;
  weigh_all_rows<Floats, true>(a, first, count, c, mass, weights, ld, sums, masses, ahead);
  sums.sum(count, sum);
  masses.sum(count, row_mass);
}

// Sums of a row's weights for which weigh_rows() lost nothing: no weight that matters was flushed,
// and a product with values of up to kLargeValue cannot overflow.
constexpr float kLeastRowSum = 0x1p-16F;
constexpr float kLargestRowSum = 0x1p30F;

HWY_INLINE bool row_sums_are_safe(const float* sum, std::int64_t count) {
  bool safe = true;  // false for NaN
  for (std::int64_t i = 0; i < count; ++i) {
    safe = safe && sum[i] >= kLeastRowSum && sum[i] <= kLargestRowSum;
  }
  return safe;
}

HWY_INLINE bool all_at_most(const float* x, std::int64_t count, float most) {
  bool all = true;  // false for NaN
  for (std::int64_t i = 0; i < count; ++i) all = all && x[i] <= most;
  return all;
}

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#endif
