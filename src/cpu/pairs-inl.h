// Words of two bf16 numbers, for products that add two at a time in f32 (AVX512-BF16). Operands are
// rounded to bf16, as those of tensor cores are: for tensors of bf16. Highway 1.0 does not have the
// instructions, and a target of its own would compile everything once more, so they are assembly
// here; kernels that use them ask the CPU first (targets.cc).
// SPDX-License-Identifier: Apache-2.0
#if defined(LLN_CPU_PAIRS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LLN_CPU_PAIRS_INL_H_
#undef LLN_CPU_PAIRS_INL_H_
#else
#define LLN_CPU_PAIRS_INL_H_
#endif

#include "cpu/gemm-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {

#if HWY_TARGET == HWY_AVX3

struct Pairs {
  static constexpr std::int64_t kPerWord = 2;

  // sum + a.low b.low + a.high b.high
  static HWY_INLINE Vec multiply_add(Vec a, Vec b, Vec sum) {
    asm("vdpbf16ps %2, %1, %0" : "+v"(sum.raw) : "v"(a.raw), "v"(b.raw));
    return sum;
  }
  // Weights are rounded before they are summed, so that averages of equal values are these values.
  static HWY_INLINE Vec rounded(Vec x) {
    const __m512i wide = _mm512_cvtepu16_epi32(halves_of(x));
    return Vec{_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16))};
  }
  // Words (low, high) of the numbers of two vectors, which are rounded().
  static HWY_INLINE Vec join_rounded(const Vec (&x)[2]) {
    const __m512i low = _mm512_srli_epi32(_mm512_castps_si512(x[0].raw), 16);
    return Vec{_mm512_castsi512_ps(_mm512_or_si512(low, _mm512_castps_si512(x[1].raw)))};
  }
  // The same of any numbers.
  static HWY_INLINE Vec join(const Vec (&x)[2]) {
    __m512i halves;  // all of x[0], then all of x[1]
    asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(halves) : "v"(x[1].raw), "v"(x[0].raw));
    const __m512i order =
        _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                         21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return Vec{_mm512_castsi512_ps(_mm512_permutexvar_epi16(order, halves))};
  }
  // Neighbouring numbers of a vector as kLanes / 2 words.
  static HWY_INLINE void store(Vec x, float* words) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(words), halves_of(x));
  }

 private:
  static HWY_INLINE __m256i halves_of(Vec x) {
    __m256i halves;
    asm("vcvtneps2bf16 %1, %0" : "=v"(halves) : "v"(x.raw));
    return halves;
  }
};

#else  // never asked for

using Pairs = Floats;

#endif

// Rows of a bf16 tensor as they are: words of neighbouring channels, `ld` words apart.
HWY_INLINE void copy_words(const ConstRows& rows, std::int64_t count, Tokens token, float* words,
                           std::int64_t ld) {
  for (std::int64_t i = 0; i < count; ++i) {
    std::memcpy(words + i * ld, rows.row(token(i)), static_cast<std::size_t>(2 * rows.width));
  }
}

// words[i, c] = rows 2 i and 2 i + 1 of a bf16 tensor at channel c, a row of zeros behind an odd
// number of them. The width is whole vectors.
HWY_NOINLINE inline void load_pairs(const ConstRows& rows, std::int64_t count, Tokens token,
                                    float* HWY_RESTRICT words, std::int64_t ld) {
  const hn::RebindToUnsigned<Tag> du;
  const hn::Rebind<std::uint16_t, Tag> d16;
  const auto load = [&](std::int64_t i, std::int64_t c) HWY_ATTR {
    if (i >= count) return hn::Zero(du);
    const auto* const row = reinterpret_cast<const std::uint16_t*>(rows.row(token(i)));
    return hn::PromoteTo(du, hn::LoadU(d16, row + c));
  };
  for (std::int64_t i = 0; i < count; i += 2, words += ld) {
    for (std::int64_t c = 0; c < rows.width; c += kLanes) {
      const auto pair = hn::Or(load(i, c), hn::ShiftLeft<16>(load(i + 1, c)));
      hn::Store(hn::BitCast(kTag, pair), kTag, words + c);
    }
  }
}

// Tiles of f32 as operands in words: `words` may be the tile itself, and rows are as far apart in
// both. What is summed over are the rows of the tile, or its columns; a width is whole vectors.
template <class Words>
HWY_INLINE void join_rows(const float* tile, std::int64_t ld, std::int64_t rows, std::int64_t width,
                          float* words) {
  if constexpr (Words::kPerWord == 2) {
    for (std::int64_t i = 0; i < rows; i += 2, words += ld) {
      for (std::int64_t c = 0; c < width; c += kLanes) {
        const float* const at = tile + i * ld + c;
        const Vec next = i + 1 < rows ? hn::Load(kTag, at + ld) : hn::Zero(kTag);
        hn::Store(Words::join({hn::Load(kTag, at), next}), kTag, words + c);
      }
    }
  }
}
template <class Words>
HWY_INLINE void join_columns(const float* tile, std::int64_t ld, std::int64_t rows,
                             std::int64_t width, float* words) {
  if constexpr (Words::kPerWord == 2) {
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t c = 0; c < width; c += kLanes) {
        Words::store(hn::Load(kTag, tile + i * ld + c), words + i * ld + c / 2);
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#endif
