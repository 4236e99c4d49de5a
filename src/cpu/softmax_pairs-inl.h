// Rows of softmax attention over one tile of keys by products of bf16 pairs (pairs-inl.h): what the
// block-diagonal part of bf16 tensors is made of, forward.
// SPDX-License-Identifier: Apache-2.0
#if defined(LLN_CPU_SOFTMAX_PAIRS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LLN_CPU_SOFTMAX_PAIRS_INL_H_
#undef LLN_CPU_SOFTMAX_PAIRS_INL_H_
#else
#define LLN_CPU_SOFTMAX_PAIRS_INL_H_
#endif

#include "cpu/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {

// Whether the magnitudes of both halves of all words are at most `limit`; those of NaN are not.
HWY_INLINE bool halves_within(const float* words, std::int64_t count, float limit) {
  const hn::RebindToUnsigned<Tag> du;
  const Vec most = hn::Set(kTag, limit);
  auto inside = hn::FirstN(kTag, static_cast<std::size_t>(kLanes));
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const auto both = hn::BitCast(du, hn::Load(kTag, words + i));
    const Vec low = hn::BitCast(kTag, hn::ShiftLeft<16>(both));
    const Vec high = hn::BitCast(kTag, hn::And(both, hn::Set(du, 0xFFFF0000U)));
    inside = hn::And(inside, hn::And(hn::Le(hn::Abs(low), most), hn::Le(hn::Abs(high), most)));
  }
  return hn::AllTrue(kTag, inside);
}

// softmax_rows_fast() for tensors of bf16 without a causal mask, dims in multiples of 16. q and k
// are words as they are; their products are scaled where they are stored.
template <class Weight>
HWY_INLINE bool softmax_rows_pairs(const ScoreHead& head, Range rows, Range keys, Weight&& weight,
                                   Product target, std::int64_t width) {
  if constexpr (Pairs::kPerWord != 2) return false;
  const ScoreTiles& t = *head.tiles;
  const Dims& dims = *head.dims;
  const std::int64_t n = keys.size(), count = rows.size(), ld = padded(n);
  if (head.sequence->mask != nullptr || n <= 0 || n > dims.chunk) return false;
  load_pairs(head.v, n, keys.begin, t.v, dims.dvp);
  if (!halves_within(t.v, ceil_div(n, 2) * dims.dvp, kLargeValue)) return false;
  for (std::int64_t i = 0; i < n; ++i) t.key[i] = keys.begin + i;
  copy_words(head.q, count, rows.begin, t.q, dims.dp);
  copy_words(head.k, n, keys.begin, t.k, dims.dp);
  transpose(t.k, dims.dp, n, dims.dp / 2, t.kt, ld);
  HWY_ALIGN float scale[kMaxChunk];  // of the scores of each row
  std::fill(scale, scale + count, head.scale() * kLog2E);
  const auto multiply = [&](std::int64_t first, std::int64_t some) HWY_ATTR {
    gemm<Pairs>(some, ld, dims.d / 2, by_rows(t.q + first * dims.dp, dims.dp), t.kt, ld,
                {t.scores + first * ld, ld, false, scale});
  };
  multiply(0, count);
  exponentiate_rows<Pairs>(head, rows, n, t.row_sum);
  for (std::int64_t i = 0; i < count; ++i) {
    if (!row_sums_are_safe(t.row_sum + i, 1)) {  // again, with the maximum taken off
      multiply(i, 1);
      float* const row = t.scores + i * ld;
      t.row_sum[i] = exponentiate<Pairs>(row, n, ld, max_score(row, n));
    }
    t.row_sum[i] = weight(rows.begin + i) / t.row_sum[i];
  }
  join_columns<Pairs>(t.scores, ld, count, ld, t.scores);
  target.row_factor = t.row_sum;
  gemm<Pairs>(count, width, ceil_div(n, 2), by_rows(t.scores, ld), t.v, dims.dvp, target);
  return true;
}

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#endif
