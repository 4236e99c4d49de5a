// Backward of softmax attention between a tile of rows and a tile of keys, in two halves: over rows
// for dq, over keys for dk and dv. Where a tile of keys is all that its rows see, the half over
// keys can do both.
// SPDX-License-Identifier: Apache-2.0
#if defined(LLN_CPU_SOFTMAX_BACKWARD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LLN_CPU_SOFTMAX_BACKWARD_INL_H_
#undef LLN_CPU_SOFTMAX_BACKWARD_INL_H_
#else
#define LLN_CPU_SOFTMAX_BACKWARD_INL_H_
#endif

#include "cpu/softmax-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {

// Scores and their gradients g v^T of the loaded rows and keys.
HWY_INLINE void score_products(const ScoreHead& head, std::int64_t rows, std::int64_t keys) {
  const ScoreTiles& t = *head.tiles;
  const Dims& dims = *head.dims;
  const std::int64_t ld = padded(keys);
  gemm(rows, ld, dims.d, by_rows(t.q, dims.dp), t.kt, ld, t.scores, ld, false);
  gemm(rows, ld, dims.dv, by_rows(t.g, dims.dvp), t.vt, ld, t.dscores, ld, false);
}

// Running maximum, sum and sum of weight times gradient of one row over the tile.
HWY_INLINE void update_statistics(const ScoreHead& head, std::int64_t i, std::int64_t limit,
                                  std::int64_t ld) {
  const ScoreTiles& t = *head.tiles;
  float* const row = t.scores + i * ld;
  const float m = std::max(t.row_max[i], max_score(row, limit));
  const Vec shift = hn::Set(kTag, m);
  Vec sum = hn::Zero(kTag);
  Vec dot = hn::Zero(kTag);
  for (std::int64_t c = 0; c < limit; c += kLanes) {
    const Vec p = exp2(hn::Sub(load_score(row, c, limit), shift));
    Vec dp = hn::Load(kTag, t.dscores + i * ld + c);
    if (c + kLanes > limit) {
      dp = hn::IfThenElseZero(hn::FirstN(kTag, static_cast<std::size_t>(limit - c)), dp);
    }
    sum = hn::Add(sum, p);
    dot = hn::MulAdd(p, dp, dot);
  }
  const float decay = m == t.row_max[i] ? 1.0F : std::exp2(t.row_max[i] - m);
  t.row_max[i] = m;
  t.row_sum[i] = t.row_sum[i] * decay + reduce_sum(sum);
  t.row_delta[i] = t.row_delta[i] * decay + reduce_sum(dot);
}

// After the last tile: row_max becomes log2 of the sum of 2^score, row_delta the mean of g v^T.
HWY_INLINE void finish_statistics(const ScoreTiles& t, std::int64_t rows) {
  for (std::int64_t i = 0; i < rows; ++i) {
    const float sum = t.row_sum[i];
    t.row_delta[i] *= inverse_or_zero(sum);
    t.row_max[i] = sum == 0 ? 0.0F : t.row_max[i] + std::log2(sum);
  }
}

HWY_INLINE void reset_statistics(const ScoreTiles& t, std::int64_t rows) {
  std::fill(t.row_max, t.row_max + rows, kLowest);
  std::fill(t.row_sum, t.row_sum + rows, 0.0F);
  std::fill(t.row_delta, t.row_delta + rows, 0.0F);
}

// scores = weight * P, dscores = weight * P * (g v^T - delta) of one row.
HWY_INLINE void score_gradient(const ScoreTiles& t, std::int64_t i, std::int64_t limit,
                               std::int64_t ld, float weight) {
  float* const row = t.scores + i * ld;
  float* const drow = t.dscores + i * ld;
  const Vec shift = hn::Set(kTag, t.row_max[i]);
  const Vec delta = hn::Set(kTag, t.row_delta[i]);
  const Vec w = hn::Set(kTag, weight);
  std::int64_t c = 0;
  for (; c < limit; c += kLanes) {
    const Vec p = hn::Mul(w, exp2(hn::Sub(load_score(row, c, limit), shift)));
    Vec dp = hn::Mul(p, hn::Sub(hn::Load(kTag, drow + c), delta));
    if (c + kLanes > limit) {
      dp = hn::IfThenElseZero(hn::FirstN(kTag, static_cast<std::size_t>(limit - c)), dp);
    }
    hn::Store(p, kTag, row + c);
    hn::Store(dp, kTag, drow + c);
  }
  for (; c < ld; c += kLanes) {
    hn::Store(hn::Zero(kTag), kTag, row + c);
    hn::Store(hn::Zero(kTag), kTag, drow + c);
  }
}

// row_max and row_delta of rows whose g is loaded in tiles.g, over all their keys. Returns the
// number of keys in the last tile, whose scores and gradients are left in place.
HWY_INLINE std::int64_t softmax_statistics(const ScoreHead& head, Range rows, Range keys) {
  const ScoreTiles& t = *head.tiles;
  const std::int64_t count = rows.size();
  const std::int64_t step = head.dims->chunk;
  std::int64_t n = 0;
  reset_statistics(t, count);
  if (keys.size() > 0) load_queries(head, rows);
  for (std::int64_t j = keys.begin; j < keys.end; j += step) {
    n = load_keys(head, {j, std::min(keys.end, j + step)}, /*values_transposed=*/true);
    score_products(head, count, n);
    for (std::int64_t i = 0; i < count; ++i) {
      update_statistics(head, i, visible(head, rows.begin + i, n), padded(n));
    }
  }
  finish_statistics(t, count);
  return n;
}

// Backward over rows whose g is loaded in tiles.g (times the channel weights): dq[rows, dp] is set,
// row_max and row_delta hold the rows' statistics afterwards (delta = g . out). `out` is set to the
// attention's rows where it is not null.
template <class Weight>
HWY_INLINE void softmax_backward_rows(const ScoreHead& head, Range rows, Range keys,
                                      Weight&& weight, float* HWY_RESTRICT dq,
                                      float* HWY_RESTRICT out) {
  const ScoreTiles& t = *head.tiles;
  const Dims& dims = *head.dims;
  const std::int64_t count = rows.size();
  std::fill(dq, dq + count * dims.dp, 0.0F);
  if (out != nullptr) std::fill(out, out + count * dims.dvp, 0.0F);
  if (head.causal) keys.end = std::min(keys.end, rows.end);
  std::int64_t n = softmax_statistics(head, rows, keys);
  if (keys.size() > 0) {
    const bool one_tile = keys.size() <= dims.chunk;
    for (std::int64_t j = keys.begin; j < keys.end; j += dims.chunk) {
      if (!one_tile) {
        n = load_keys(head, {j, std::min(keys.end, j + dims.chunk)}, /*values_transposed=*/true);
        score_products(head, count, n);
      }
      const std::int64_t ld = padded(n);
      if (out != nullptr) {
        for (std::int64_t i = 0; i < count; ++i) {
          const std::int64_t limit = visible(head, rows.begin + i, n);
          float* const copy = t.kt + i * ld;  // kt has been used; scores are still needed
          std::copy(t.scores + i * ld, t.scores + (i + 1) * ld, copy);
          exponentiate(copy, limit, ld, t.row_max[i]);
        }
        multiply_visible(head, rows, n, t.kt, t.v, dims.dvp, out);
      }
      for (std::int64_t i = 0; i < count; ++i) {
        score_gradient(t, i, visible(head, rows.begin + i, n), ld, weight(rows.begin + i));
      }
      multiply_visible(head, rows, n, t.dscores, t.k, dims.dp, dq);
    }
  }
  for (std::int64_t i = 0; i < count; ++i) scale_row(dq + i * dims.dp, dims.dp, head.scale());
}

// The same as the statistics and score_gradient() of rows whose keys are all in the tile, with one
// exponential for each score: no maximum is taken off. row_delta is set, row_max is not. False, and
// scores are spoilt, where a row's weights cannot be trusted.
template <class Weight>
HWY_INLINE bool score_gradients_fast(const ScoreHead& head, Range rows, std::int64_t n,
                                     Weight&& weight) {
  const ScoreTiles& t = *head.tiles;
  const std::int64_t count = rows.size();
  const std::int64_t ld = padded(n);
  RowVectors sums, dots;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t limit = visible(head, rows.begin + i, n);
    Vec sum = hn::Zero(kTag);
    Vec dot = hn::Zero(kTag);
    for (std::int64_t c = 0; c < ld; c += kLanes) {
      Vec p = exp2(hn::Load(kTag, t.scores + i * ld + c));
      Vec dp = hn::Load(kTag, t.dscores + i * ld + c);
      if (c + kLanes > limit) {
        const auto seen = hn::FirstN(
            kTag, static_cast<std::size_t>(std::clamp<std::int64_t>(limit - c, 0, kLanes)));
        p = hn::IfThenElseZero(seen, p);
        dp = hn::IfThenElseZero(seen, dp);
        hn::Store(dp, kTag, t.dscores + i * ld + c);
      }
      sum = hn::Add(sum, p);
      dot = hn::MulAdd(p, dp, dot);
      hn::Store(p, kTag, t.scores + i * ld + c);
    }
    sums.set(i, sum);
    dots.set(i, dot);
  }
  sums.sum(count, t.row_sum);
  dots.sum(count, t.row_delta);
  for (std::int64_t i = 0; i < count; ++i) {  // as large as the gradients of values times weights
    if (!(std::abs(t.row_delta[i]) <= kLargeValue)) return false;
  }
  if (!row_sums_are_safe(t.row_sum, count)) return false;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t limit = visible(head, rows.begin + i, n);
    const float inverse = 1 / t.row_sum[i];
    t.row_delta[i] *= inverse;
    const Vec factor = hn::Set(kTag, inverse * weight(rows.begin + i));
    const Vec delta = hn::Set(kTag, t.row_delta[i]);
    for (std::int64_t c = 0; c < ld; c += kLanes) {
      const Vec p = hn::Mul(factor, hn::Load(kTag, t.scores + i * ld + c));
      hn::Store(p, kTag, t.scores + i * ld + c);
      Vec dp = hn::Mul(p, hn::Sub(hn::Load(kTag, t.dscores + i * ld + c), delta));
      if (c + kLanes > limit) {  // 0 where the row sees no key, also if delta is no number
        dp = hn::IfThenElseZero(hn::FirstN(kTag, static_cast<std::size_t>(std::clamp<std::int64_t>(
                                                     limit - c, 0, kLanes))),
                                dp);
      }
      hn::Store(dp, kTag, t.dscores + i * ld + c);
    }
  }
  return true;
}

// The rows of a tile as softmax_backward_keys() wants them.
struct BackwardRows {
  Range rows;      // their g is in tiles.g (times the channel weights)
  bool whole;      // the tile holds all keys of these rows; otherwise the statistics of the rows
                   // are in row_max and row_delta already
  const Rows* dq;  // whole rows: where dq is added to, f32, or null
};

// Backward over a tile of keys that load_keys() brought in (n of them): adds the part of some rows
// to dk[n, dp] (still to be scaled by ln 2) and dv[n, dvp], and to dq where that is wanted.
template <class Weight>
HWY_INLINE void softmax_backward_keys(const ScoreHead& head, const BackwardRows& part,
                                      std::int64_t n, Weight&& weight, float* HWY_RESTRICT dk,
                                      float* HWY_RESTRICT dv) {
  const ScoreTiles& t = *head.tiles;
  const Dims& dims = *head.dims;
  const Range rows = part.rows;
  const std::int64_t count = rows.size();
  const std::int64_t ld = padded(n);
  load_queries(head, rows);
  score_products(head, count, n);
  if (!part.whole || !score_gradients_fast(head, rows, n, weight)) {
    if (part.whole) {
      score_products(head, count, n);
      reset_statistics(t, count);
      for (std::int64_t i = 0; i < count; ++i) {
        update_statistics(head, i, visible(head, rows.begin + i, n), ld);
      }
      finish_statistics(t, count);
    }
    for (std::int64_t i = 0; i < count; ++i) {
      score_gradient(t, i, visible(head, rows.begin + i, n), ld, weight(rows.begin + i));
    }
  }
  gemm(n, dims.dvp, count, by_columns(t.scores, ld), t.g, dims.dvp, {dv, dims.dvp, true});
  gemm(n, dims.dp, count, by_columns(t.dscores, ld), t.q, dims.dp, {dk, dims.dp, true});
  if (part.dq == nullptr) return;
  std::fill(t.row_sum, t.row_sum + count, head.scale());
  gemm(count, dims.d, n, by_rows(t.dscores, ld), t.k, dims.dp,
       {floats_of(*part.dq, rows.begin), leading_dim(*part.dq), true, t.row_sum});
}

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#endif
