// Softmax attention of a tile of rows over a range of keys, streamed in tiles with a running
// maximum: what the block-diagonal part and the softmax operation are made of. The backward is in
// softmax_backward-inl.h.
// SPDX-License-Identifier: Apache-2.0
#if defined(LLN_CPU_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LLN_CPU_SOFTMAX_INL_H_
#undef LLN_CPU_SOFTMAX_INL_H_
#else
#define LLN_CPU_SOFTMAX_INL_H_
#endif

#include "cpu/exponentials-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {

// One query head against its key head, with the scratch to work in.
struct ScoreHead {
  const Sequence* sequence;
  const Dims* dims;
  const ScoreTiles* tiles;
  bool causal;
  std::int64_t block;  // diagonal block, 0 for softmax over all keys
  ConstRows q, k, v;

  float scale() const { return 1.0F / std::sqrt(static_cast<float>(dims->d)); }
};

// Rows and the keys that they see, but for masks. Both are empty for tokens in no block.
struct Block {
  Range rows;
  Range keys;
};

// Calls body(part, block) for the parts of a range of tokens that belong to the same block.
template <class Body>
void for_each_block(const ScoreHead& head, Range tokens, Body&& body) {
  const Sequence& seq = *head.sequence;
  if (head.block == 0) {
    return body(tokens, Block{{0, seq.q_tokens}, {seq.key_first, seq.key_end}});
  }
  std::int64_t token = tokens.begin;
  if (token < seq.block_origin) {
    token = std::min(tokens.end, seq.block_origin);
    body(Range{tokens.begin, token}, Block{});
  }
  while (token < tokens.end) {
    const std::int64_t begin =
        seq.block_origin + (token - seq.block_origin) / head.block * head.block;
    const std::int64_t end = std::min(begin + head.block, seq.k_tokens);
    const std::int64_t stop = std::min(end, tokens.end);
    body(Range{token, stop}, Block{{std::max<std::int64_t>(begin, 0), end},
                                   {std::max(begin, seq.key_first), std::min(end, seq.key_end)}});
    token = stop;
  }
}

// Loads the valid keys of a range into the tile and transposes them; returns how many there are.
HWY_INLINE std::int64_t load_keys(const ScoreHead& head, Range keys, bool values_transposed) {
  const ScoreTiles& t = *head.tiles;
  const Dims& dims = *head.dims;
  std::int64_t count = 0;
  for (std::int64_t j = keys.begin; j < keys.end; ++j) {
    if (head.sequence->valid(j)) t.key[count++] = j;
  }
  const std::int64_t ld = padded(count);
  load_tile(head.k, count, t.key, t.k, dims.dp);
  load_tile(head.v, count, t.key, t.v, dims.dvp);
  transpose(t.k, dims.dp, count, dims.dp, t.kt, ld);
  if (values_transposed) transpose(t.v, dims.dvp, count, dims.dvp, t.vt, ld);
  return count;
}

HWY_INLINE void load_queries(const ScoreHead& head, Range rows) {
  load_tile(head.q, rows.size(), rows.begin, head.tiles->q, head.dims->dp, head.scale() * kLog2E);
}

// Columns of the tile that a row sees: all, or with a causal mask those up to the row itself.
HWY_INLINE std::int64_t visible(const ScoreHead& head, std::int64_t row, std::int64_t count) {
  if (!head.causal) return count;
  const std::int64_t* const key = head.tiles->key;
  return std::upper_bound(key, key + count, row) - key;
}

HWY_INLINE Vec load_score(const float* row, std::int64_t c, std::int64_t limit) {
  const Vec x = clamp_exponent(hn::Load(kTag, row + c));
  if (c + kLanes <= limit) return x;
  const auto inside = hn::FirstN(kTag, static_cast<std::size_t>(limit - c));
  return hn::IfThenElse(inside, x, hn::Set(kTag, kNegInf));
}

HWY_INLINE float max_score(const float* row, std::int64_t limit) {
  Vec m = hn::Set(kTag, kLowest);
  for (std::int64_t c = 0; c < limit; c += kLanes) m = hn::Max(m, load_score(row, c, limit));
  return reduce_max(m);
}

// row = 2^(row - shift), as words of a product hold it, zero from `limit` on; returns the sum.
template <class Words = Floats>
HWY_INLINE float exponentiate(float* HWY_RESTRICT row, std::int64_t limit, std::int64_t width,
                              float shift) {
  const Vec s = hn::Set(kTag, shift);
  Vec sum = hn::Zero(kTag);
  std::int64_t c = 0;
  for (; c < limit; c += kLanes) {
    const Vec p = Words::rounded(exp2(hn::Sub(load_score(row, c, limit), s)));
    sum = hn::Add(sum, p);
    hn::Store(p, kTag, row + c);
  }
  for (; c < width; c += kLanes) hn::Store(hn::Zero(kTag), kTag, row + c);
  return reduce_sum(sum);
}

HWY_INLINE float inverse_or_zero(float sum) { return sum == 0 ? 0.0F : 1.0F / sum; }

// out[rows, width] += weights[rows, n] tile[n, width], where a row's weights are zero past the
// columns that it sees. An infinity or NaN there must not reach the row, as 0 * NaN would.
HWY_INLINE void multiply_visible(const ScoreHead& head, Range rows, std::int64_t n,
                                 const float* weights, const float* tile, std::int64_t width,
                                 float* out) {
  const std::int64_t ld = padded(n);
  if (!head.causal || all_finite(tile, n * width)) {
    return gemm(rows.size(), width, n, by_rows(weights, ld), tile, width, out, width, true);
  }
  for (std::int64_t i = 0; i < rows.size(); ++i) {
    gemm(1, width, visible(head, rows.begin + i, n), by_rows(weights + i * ld, ld), tile, width,
         out + i * width, width, true);
  }
}

// scores[rows, keys] become 2^score, as words of a product hold it, where a row sees the key and 0
// elsewhere; sum[row] their sums.
template <class Words = Floats>
HWY_INLINE void exponentiate_rows(const ScoreHead& head, Range rows, std::int64_t n,
                                  float* HWY_RESTRICT sum) {
  const std::int64_t ld = padded(n);
  float* HWY_RESTRICT const scores = head.tiles->scores;
  RowVectors partial;
  for (std::int64_t i = 0; i < rows.size(); ++i) {
    float* const row = scores + i * ld;
    const std::int64_t limit = visible(head, rows.begin + i, n);
    Vec total = hn::Zero(kTag);
    std::int64_t c = 0;
    for (; c + kLanes <= limit; c += kLanes) {
      const Vec p = Words::rounded(exp2(hn::Load(kTag, row + c)));
      total = hn::Add(total, p);
      hn::Store(p, kTag, row + c);
    }
    if (c < limit) {
      const auto inside = hn::FirstN(kTag, static_cast<std::size_t>(limit - c));
      const Vec p = hn::IfThenElseZero(inside, Words::rounded(exp2(hn::Load(kTag, row + c))));
      total = hn::Add(total, p);
      hn::Store(p, kTag, row + c);
      c += kLanes;
    }
    for (; c < ld; c += kLanes) hn::Store(hn::Zero(kTag), kTag, row + c);
    partial.set(i, total);
  }
  partial.sum(rows.size(), sum);
}

// A transposed tile of the keys [begin, end), all of them valid, for the scores of a forward pass.
HWY_INLINE void load_transposed_keys(const ScoreHead& head, Range keys) {
  const ScoreTiles& t = *head.tiles;
  const std::int64_t dp = head.dims->dp;
  const std::int64_t n = keys.size();
  if (in_place(head.k) && head.k.width == dp && n % 4 == 0) {
    return transpose(floats_of(head.k, keys.begin), leading_dim(head.k), n, dp, t.kt, padded(n));
  }
  load_tile(head.k, n, keys.begin, t.k, dp);
  transpose(t.k, dp, n, dp, t.kt, padded(n));
}

// The same for one row whose sum cannot be trusted: from its scores again, with its maximum taken
// off. Returns the sum.
HWY_INLINE float exponentiate_row_again(const ScoreHead& head, Range rows, std::int64_t i,
                                        std::int64_t n) {
  const ScoreTiles& t = *head.tiles;
  const std::int64_t ld = padded(n);
  float* const row = t.scores + i * ld;
  gemm(1, ld, head.dims->d, by_rows(t.q + i * head.dims->dp, head.dims->dp), t.kt, ld, {row, ld});
  const std::int64_t limit = visible(head, rows.begin + i, n);
  return exponentiate(row, limit, ld, max_score(row, limit));
}

// Rows of softmax attention over at most one tile of keys, times a weight for each row, into
// `target` (`width` channels). Weights are 2^score without a maximum taken off, which ordinary
// scores allow. False, and nothing written, where there are more keys or none, or masked ones, or
// very large values. A row's way never depends on other rows, nor under a causal mask on keys after
// it.
template <class Weight>
HWY_INLINE bool softmax_rows_fast(const ScoreHead& head, Range rows, Range keys, Weight&& weight,
                                  Product target, std::int64_t width) {
  const ScoreTiles& t = *head.tiles;
  const Dims& dims = *head.dims;
  if (head.causal) keys.end = std::min(keys.end, rows.end);
  const std::int64_t n = keys.size();
  if (head.sequence->mask != nullptr || n <= 0 || n > dims.chunk) return false;
  const bool values_in_place = in_place(head.v) && head.v.width >= width;
  if (!values_in_place) load_tile(head.v, n, keys.begin, t.v, dims.dvp);
  const float* const v = values_in_place ? floats_of(head.v, keys.begin) : t.v;
  const std::int64_t ldv = values_in_place ? leading_dim(head.v) : dims.dvp;
  const bool ordinary_values = all_within(v, ldv, n, width, kLargeValue);
  if (!head.causal && !ordinary_values) return false;
  const std::int64_t count = rows.size();
  const std::int64_t ld = padded(n);
  for (std::int64_t i = 0; i < n; ++i) t.key[i] = keys.begin + i;
  load_queries(head, rows);
  load_transposed_keys(head, keys);
  gemm(count, ld, dims.d, by_rows(t.q, dims.dp), t.kt, ld, {t.scores, ld});
  exponentiate_rows(head, rows, n, t.row_sum);
  for (std::int64_t i = 0; i < count; ++i) {
    if (!row_sums_are_safe(t.row_sum + i, 1)) {
      t.row_sum[i] = exponentiate_row_again(head, rows, i, n);
    }
    t.row_sum[i] = weight(rows.begin + i) / t.row_sum[i];
  }
  if (!head.causal) {
    target.row_factor = t.row_sum;
    gemm(count, width, n, by_rows(t.scores, ld), v, ldv, target);
    return true;
  }
  // Probabilities first: then products cannot overflow, whatever the values after the row are.
  for (std::int64_t i = 0; i < count; ++i) scale_row(t.scores + i * ld, ld, t.row_sum[i]);
  if (ordinary_values) {
    gemm(count, width, n, by_rows(t.scores, ld), v, ldv, target);
    return true;
  }
  for (std::int64_t i = 0; i < count; ++i) {  // infinities and NaN must not reach rows before them
    gemm(1, width, visible(head, rows.begin + i, n), by_rows(t.scores + i * ld, ld), v, ldv,
         target.below(i));
  }
  return true;
}

// out[rows, dvp] = softmax(q k^T / sqrt(d)) v over `keys`; zero rows where there is no key.
HWY_NOINLINE inline void softmax_rows_carefully(const ScoreHead& head, Range rows, Range keys,
                                                float* HWY_RESTRICT out) {
  const ScoreTiles& t = *head.tiles;
  const Dims& dims = *head.dims;
  const std::int64_t count = rows.size();
  std::fill(out, out + count * dims.dvp, 0.0F);
  if (head.causal) keys.end = std::min(keys.end, rows.end);
  if (keys.size() <= 0) return;
  load_queries(head, rows);
  std::fill(t.row_max, t.row_max + count, kLowest);
  std::fill(t.row_sum, t.row_sum + count, 0.0F);
  const bool one_tile = keys.size() <= dims.chunk;
  float value_scale = 1;
  for (std::int64_t j = keys.begin; j < keys.end; j += dims.chunk) {
    const std::int64_t n =
        load_keys(head, {j, std::min(keys.end, j + dims.chunk)}, /*values_transposed=*/false);
    if (n == 0) continue;
    const std::int64_t ld = padded(n);
    gemm(count, ld, dims.d, by_rows(t.q, dims.dp), t.kt, ld, t.scores, ld, false);
    for (std::int64_t i = 0; i < count; ++i) {
      float* const row = t.scores + i * ld;
      const std::int64_t limit = visible(head, rows.begin + i, n);
      const float m = std::max(t.row_max[i], max_score(row, limit));
      const float sum = exponentiate(row, limit, ld, m);
      if (one_tile) {  // probabilities at once: sums of values cannot overflow
        scale_row(row, ld, inverse_or_zero(sum));
        continue;
      }
      if (m != t.row_max[i]) {
        const float decay = std::exp2(t.row_max[i] - m);
        t.row_sum[i] *= decay;
        scale_row(out + i * dims.dvp, dims.dvp, decay);
        t.row_max[i] = m;
      }
      t.row_sum[i] += sum;
    }
    if (!one_tile && value_scale == 1 && largest_magnitude(t.v, n * dims.dvp) > kLargeValue) {
      value_scale = kSmallScale;
      scale_row(out, count * dims.dvp, value_scale);
    }
    if (value_scale != 1) scale_row(t.v, n * dims.dvp, value_scale);
    multiply_visible(head, rows, n, t.scores, t.v, dims.dvp, out);
  }
  for (std::int64_t i = 0; !one_tile && i < count; ++i) {
    scale_row(out + i * dims.dvp, dims.dvp, inverse_or_zero(t.row_sum[i]) / value_scale);
  }
}

// target (+)= weight * softmax(q k^T / sqrt(d)) v over `keys`, `width` channels; zero rows where
// there is no key. `spare` [rows, dvp] is scratch memory.
template <class Weight>
HWY_INLINE void softmax_rows(const ScoreHead& head, Range rows, Range keys, Weight&& weight,
                             const Product& target, std::int64_t width, float* spare) {
  if (softmax_rows_fast(head, rows, keys, weight, target, width)) return;
  softmax_rows_carefully(head, rows, keys, spare);
  for (std::int64_t i = 0; i < rows.size(); ++i) {
    const Vec w = hn::Set(kTag, weight(rows.begin + i));
    const float* const row = spare + i * head.dims->dvp;
    float* const out = target.out + i * target.ld;
    for (std::int64_t c = 0; c < width; c += kLanes) {
      const Vec x = hn::Mul(w, hn::Load(kTag, row + c));
      hn::StoreU(target.accumulate ? hn::Add(hn::LoadU(kTag, out + c), x) : x, kTag, out + c);
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#endif
