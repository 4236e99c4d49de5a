// The exact masked block inside a causal chunk. With r a reference exponent per channel,
//   2^(a_i + u_j) = sum_l 2^(a_il + r_l) 2^(u_jl - r_l)
// is a plain matrix product as long as the keys of the chunk spread by less than kMaxSpread in
// every channel; a chunk that spreads more is halved, down to single rows, which are always exact.
// The part of the keys before the chunk is read from their state, and both parts are joined by
// their log masses (docs/theory.md).
// SPDX-License-Identifier: Apache-2.0
#if defined(LLN_CPU_CAUSAL_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LLN_CPU_CAUSAL_INL_H_
#undef LLN_CPU_CAUSAL_INL_H_
#else
#define LLN_CPU_CAUSAL_INL_H_
#endif

#include "cpu/head-inl.h"
#include "cpu/layout.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {

// 60 in natural units: E lies in [2^-43, 2^43], and with row factors of at most 1 no product or sum
// of products leaves the range of f32.
constexpr float kMaxSpread = 86.5F;
// Rows of the masked products that are computed together: above the diagonal nothing is, in steps
// of this.
constexpr std::int64_t kTriangleStep = 16;

// Exponents and values of all tokens of a chunk; those that are not valid have u = -inf and v = 0.
HWY_INLINE void load_chunk_keys(const Dims& dims, const KeyHead& head, Range chunk, float* slope,
                                const CausalTiles& t) {
  const std::int64_t count = chunk.size();
  load_exponents(head.k, count, chunk.begin, head.feature, head.power, head.beta, t.keys, dims.dp,
                 slope);
  load_tile(head.v, count, chunk.begin, t.values, dims.dvp);
  for (std::int64_t i = 0; i < count; ++i) {
    if (head.sequence->valid(chunk.begin + i)) continue;
    std::fill(t.keys + i * dims.dp, t.keys + (i + 1) * dims.dp, kNegInf);
    std::fill(t.values + i * dims.dvp, t.values + (i + 1) * dims.dvp, 0.0F);
    if (slope != nullptr) std::fill(slope + i * dims.dp, slope + (i + 1) * dims.dp, 0.0F);
  }
}

struct Leaf {
  Range rows;     // counted from the chunk's first token
  bool has_keys;  // at least one of them is valid
};

// Middle and spread of the valid keys of some rows of the chunk; false where they spread too far,
// or hold an infinity or NaN, which must not reach the rows before it: in a product over the chunk
// it would, as 0 * NaN.
HWY_INLINE bool measure_spread(const Dims& dims, Range rows, const CausalTiles& t, bool& has_keys) {
  const Vec none = hn::Set(kTag, kNegInf);
  bool fits = all_finite(t.values + rows.begin * dims.dvp, rows.size() * dims.dvp);
  has_keys = false;
  for (std::int64_t l = 0; l < dims.dp; l += kLanes) {
    const auto real =
        hn::FirstN(kTag, static_cast<std::size_t>(std::clamp<std::int64_t>(dims.d - l, 0, kLanes)));
    Vec high = none;
    Vec low = hn::Neg(high);
    auto exists = hn::Lt(none, none);
    auto nan = exists;
    for (std::int64_t i = rows.begin; i < rows.end; ++i) {
      const Vec u = hn::Load(kTag, t.keys + i * dims.dp + l);
      const auto counts = hn::Gt(u, none);  // neither -inf nor NaN
      exists = hn::Or(exists, hn::Not(hn::Eq(u, none)));
      nan = hn::Or(nan, is_nan(u));
      high = hn::IfThenElse(counts, hn::Max(high, u), high);
      low = hn::IfThenElse(counts, hn::Min(low, u), low);
    }
    const auto any = hn::And(real, hn::Ge(high, low));
    const Vec spread = hn::IfThenElseZero(any, hn::Sub(high, low));
    if (!hn::AllTrue(kTag, hn::Le(spread, hn::Set(kTag, kMaxSpread)))) fits = false;
    if (!hn::AllFalse(kTag, hn::And(real, exists))) has_keys = true;
    if (!hn::AllFalse(kTag, hn::And(real, nan))) fits = false;
    // Half of each first: the sum of two exponents at the limit would overflow.
    const Vec half = hn::Set(kTag, 0.5F);
    const Vec middle = hn::IfThenElseZero(any, hn::MulAdd(high, half, hn::Mul(low, half)));
    hn::Store(middle, kTag, t.reference + l);
    hn::Store(hn::IfThenElse(real, middle, hn::Set(kTag, kNegInf)), kTag, t.row_reference + l);
  }
  return fits;
}

// Calls body(leaf, state of all keys before it) for the leaves of some rows, from first to last or
// from last to first.
template <bool kReverse, class Body>
void for_each_leaf(const Dims& dims, Range rows, const State& before, const CausalTiles& t,
                   int halvings, Body&& body) {
  bool has_keys = false;
  const bool fits = measure_spread(dims, rows, t, has_keys);
  if (fits || rows.size() == 1) return body(Leaf{rows, has_keys}, before);
  const std::int64_t middle = rows.begin + rows.size() / 2;
  const Range first{rows.begin, middle};
  const State& between = t.halves[static_cast<std::size_t>(halvings)];
  if (!kReverse) for_each_leaf<kReverse>(dims, first, before, t, halvings + 1, body);
  reset(t.half_sums, dims);
  std::copy(t.keys + first.begin * dims.dp, t.keys + first.end * dims.dp, t.spare);
  add_keys(dims, t.spare, t.values + first.begin * dims.dvp, first.size(), t.half_sums);
  join(dims, &before, t.half_sums, between);
  for_each_leaf<kReverse>(dims, {middle, rows.end}, between, t, halvings + 1, body);
  if (kReverse) for_each_leaf<kReverse>(dims, first, before, t, halvings + 1, body);
}

// E and its transpose for the keys of a leaf; rows of keys that are not valid are 0.
HWY_INLINE void make_relative(const Dims& dims, const Leaf& leaf, const CausalTiles& t) {
  const std::int64_t count = leaf.rows.size();
  const float* const u = t.keys + leaf.rows.begin * dims.dp;
  for (std::int64_t i = 0; i < count; ++i) {
    for (std::int64_t l = 0; l < dims.dp; l += kLanes) {
      const Vec x = hn::Load(kTag, u + i * dims.dp + l);
      hn::Store(exp2(hn::Sub(x, hn::Load(kTag, t.reference + l))), kTag,
                t.relative + i * dims.dp + l);
    }
  }
  transpose(t.relative, dims.dp, count, dims.dp, t.relative_transposed, padded(count));
}

// target = lower b for a lower triangular [leaf, leaf] and b[leaf, width].
HWY_INLINE void multiply_lower(std::int64_t count, std::int64_t width, const float* lower,
                               const float* b, std::int64_t ldb, const Product& target) {
  const std::int64_t ld = padded(count);
  for (std::int64_t begin = 0; begin < count; begin += kTriangleStep) {
    const std::int64_t end = std::min(count, begin + kTriangleStep);
    gemm(end - begin, width, end, by_rows(lower + begin * ld, ld), b, ldb, target.below(begin));
  }
}

// target = lower^T b.
HWY_INLINE void multiply_lower_transposed(std::int64_t count, std::int64_t width,
                                          const float* lower, const float* b, std::int64_t ldb,
                                          const Product& target) {
  const std::int64_t ld = padded(count);
  for (std::int64_t begin = 0; begin < count; begin += kTriangleStep) {
    const std::int64_t end = std::min(count, begin + kTriangleStep);
    gemm(end - begin, width, count - begin, by_columns(lower + begin * ld + begin, ld),
         b + begin * ldb, ldb, target.below(begin));
  }
}

// out = tril(a b^T) for a[leaf, depth] and b transposed, and row_sum its row sums where not null
// (room for padded(count)). Above the diagonal there are zeros, whatever b holds there.
HWY_NOINLINE inline void lower_product(std::int64_t count, std::int64_t depth, const float* a,
                                       std::int64_t lda, const float* b_transposed, float* out,
                                       float* row_sum) {
  const std::int64_t ld = padded(count);
  RowVectors partial;
  for (std::int64_t begin = 0; begin < count; begin += kTriangleStep) {
    const std::int64_t end = std::min(count, begin + kTriangleStep);
    gemm(end - begin, padded(end), depth, by_rows(a + begin * lda, lda), b_transposed, ld,
         {out + begin * ld, ld});
    for (std::int64_t i = begin; i < end; ++i) {
      float* const row = out + i * ld;
      Vec sum = hn::Zero(kTag);
      std::int64_t c = 0;
      for (; c + kLanes <= i + 1; c += kLanes) sum = hn::Add(sum, hn::Load(kTag, row + c));
      if (c < i + 1) {
        const auto below = hn::FirstN(kTag, static_cast<std::size_t>(i + 1 - c));
        const Vec x = hn::IfThenElseZero(below, hn::Load(kTag, row + c));
        sum = hn::Add(sum, x);
        hn::Store(x, kTag, row + c);
        c += kLanes;
      }
      for (; c < ld; c += kLanes) hn::Store(hn::Zero(kTag), kTag, row + c);
      partial.set(i, sum);
    }
  }
  if (row_sum != nullptr) partial.sum(count, row_sum);
}

// Joins the masses of both parts: the factors that make prefix_weights and products probabilities.
// Only the difference of their exponents enters, so nothing is lost where both are large.
HWY_INLINE void join_masses(std::int64_t count, const CausalTiles& t) {
  const Vec zero = hn::Zero(kTag);
  const Vec lowest = hn::Set(kTag, kLowest);
  for (std::int64_t i = 0; i < count; i += kLanes) {
    const Vec prefix = hn::Load(kTag, t.prefix_sum + i);
    const Vec chunk = hn::Load(kTag, t.chunk_sum + i);
    // A part without mass is infinitely far below the other.
    const Vec prefix_high =
        hn::IfThenElse(hn::Eq(prefix, zero), lowest, hn::Load(kTag, t.prefix_high + i));
    const Vec chunk_high =
        hn::IfThenElse(hn::Eq(chunk, zero), lowest, hn::Load(kTag, t.chunk_high + i));
    const Vec above = hn::Sub(chunk_high, prefix_high);
    const Vec prefix_share = exp2(hn::Min(zero, hn::Neg(above)));
    const Vec chunk_share = exp2(hn::Min(zero, above));
    const Vec mass = hn::MulAdd(prefix, prefix_share, hn::Mul(chunk, chunk_share));
    const auto empty = hn::Eq(mass, zero);
    hn::Store(hn::IfThenZeroElse(empty, hn::Div(prefix_share, mass)), kTag, t.prefix_factor + i);
    hn::Store(hn::IfThenZeroElse(empty, hn::Div(chunk_share, mass)), kTag, t.chunk_factor + i);
  }
}

// All weights of the rows of a leaf, for one query head: prefix_weights and products with their
// factors. Expects make_relative() to have run. With one exponential for each channel of a row:
// Y = 2^(a + r), and the weights of the state before the leaf are Y 2^(c0 - r). False where weights
// cannot be trusted.
HWY_NOINLINE inline bool make_weights_fast(const Dims& dims, const QueryHead& head,
                                           std::int64_t first_row, const Leaf& leaf,
                                           const State& before, const CausalTiles& t) {
  const std::int64_t dp = dims.dp;
  if (!leaf.has_keys || head.q.width != dp || !are_exponents(head.q, head.feature)) return false;
  const float high = *std::max_element(t.reference, t.reference + dp);
  if (!(std::abs(high) < kLargestReference)) return false;
  HWY_ALIGN float shifted[kMaxDim], keep[kMaxDim];
  for (std::int64_t l = 0; l < dp; l += kLanes) {
    const Vec r = hn::Load(kTag, t.reference + l);
    hn::Store(hn::Sub(r, hn::Set(kTag, high)), kTag, shifted + l);
    hn::Store(exp2(hn::Sub(hn::Load(kTag, before.c + l), r)), kTag, keep + l);
  }
  if (!all_within(keep, dp, kLargestRowSum)) return false;
  const std::int64_t count = leaf.rows.size();
  Ahead nothing;
  weigh_rows({head.q, log2_scale(head.alpha)}, first_row, count, shifted, keep, t.chunk_weights, dp,
             t.chunk_high, t.prefix_factor, nothing);
  lower_product(count, dims.d, t.chunk_weights, dp, t.relative_transposed, t.products, t.chunk_sum);
  add_scaled(t.prefix_factor, t.chunk_sum, padded(count), 1.0F, true);
  if (!row_sums_are_safe(t.prefix_factor, count) ||
      !all_at_most(t.chunk_high, count, kLargestRowSum)) {
    return false;
  }
  invert_sums(count, t.prefix_factor);
  std::copy(t.prefix_factor, t.prefix_factor + padded(count), t.chunk_factor);
  for (std::int64_t i = 0; i < count; ++i) {
    for (std::int64_t l = 0; l < dp; l += kLanes) {
      const Vec y = hn::Load(kTag, t.chunk_weights + i * dp + l);
      hn::Store(hn::Mul(y, hn::Load(kTag, keep + l)), kTag, t.prefix_weights + i * dp + l);
    }
  }
  return true;
}

// The same for any leaf: both parts by themselves, each with its maximum, then joined.
HWY_NOINLINE inline void make_weights(const Dims& dims, const QueryHead& head,
                                      std::int64_t first_row, const Leaf& leaf, const State& before,
                                      float* slope, const CausalTiles& t) {
  if (make_weights_fast(dims, head, first_row, leaf, before, t)) return;
  const std::int64_t count = leaf.rows.size();
  const Range rows{first_row, first_row + count};
  head.load(dims, rows, t.rows, slope);
  channel_weights(count, dims, t.rows, before.c, t.prefix_weights, t.prefix_high, t.prefix_sum);
  if (leaf.has_keys) {
    channel_weights(count, dims, t.rows, t.row_reference, t.chunk_weights, t.chunk_high,
                    t.chunk_sum);
    lower_product(count, dims.d, t.chunk_weights, dims.dp, t.relative_transposed, t.products,
                  t.chunk_sum);
  } else {
    std::fill(t.chunk_sum, t.chunk_sum + padded(count), 0.0F);
    std::fill(t.chunk_high, t.chunk_high + padded(count), 0.0F);
  }
  join_masses(count, t);
}

// Rows before a key that exceeds the reference still need the keys below it, so sums that rows are
// to read are not scaled down by more than 2^-40: f32 has 2^-126 to give.
constexpr float kLargestRaise = 40;

// The values of a chunk's keys, at least `width` channels: where the caller has them, or in
// t.values.
HWY_INLINE Operand chunk_values(const Dims& dims, const KeyHead& head, Range chunk,
                                std::int64_t width, const CausalTiles& t) {
  if (in_place(head.v) && head.v.width >= width) {
    return {floats_of(head.v, chunk.begin), leading_dim(head.v), head.v.width};
  }
  load_tile(head.v, chunk.size(), chunk.begin, t.values, dims.dvp);
  return {t.values, dims.dvp, dims.dvp};
}

// The keys of a chunk as weights E = 2^(u - m) against the reference of `sums`, which serve the
// rows of the chunk and the sums alike: in t.relative, their column sums in t.key_sum. False, and
// the sums hold what they held, where this will not do: masked keys, a feature map that is not exp,
// values or exponents near the limits of f32, or no number.
HWY_INLINE bool weigh_chunk(const Dims& dims, const KeyHead& head, Range chunk,
                            const Operand& values, const CausalTiles& t, const KeySums& sums,
                            Ahead& ahead) {
  const Sequence& seq = *head.sequence;
  if (!are_exponents(head.k, head.feature) || seq.mask != nullptr || chunk.end > seq.key_end ||
      *sums.value_scale != 1 ||
      !all_within(values.data, values.ld, chunk.size(), values.width, kLargeValue)) {
    return false;
  }
  return weigh_against_reference(dims, {head.k, log2_scale(head.beta)}, chunk.size(), chunk.begin,
                                 kLargestRaise, sums, t.relative, t.key_sum, ahead);
}

// t.start_sums = all keys before the chunk, against the reference m of t.sums: the state before the
// segment and the sums of the segment. Its own m is that reference minus its maximum, to be added
// to exponents of rows. False where the state lies too far above the reference.
HWY_INLINE bool join_start(const Dims& dims, std::int64_t width, const State& prefix,
                           const CausalTiles& t) {
  const KeySums& start = t.start_sums;
  const Vec high = hn::Set(kTag, *std::max_element(t.sums.m, t.sums.m + width));
  HWY_ALIGN float keep[kMaxDim];
  for (std::int64_t l = 0; l < width; l += kLanes) {
    const Vec m = hn::Load(kTag, t.sums.m + l);
    const Vec share = exp2(hn::Sub(hn::Load(kTag, prefix.c + l), m));
    hn::Store(share, kTag, keep + l);
    hn::Store(hn::Add(share, hn::Load(kTag, t.sums.s + l)), kTag, start.s + l);
    hn::Store(hn::Sub(m, high), kTag, start.m + l);
  }
  if (!all_within(keep, width, kLargestRowSum)) return false;
  for (std::int64_t l = 0; l < dims.d; ++l) {
    const Vec share = hn::Set(kTag, keep[l]);
    for (std::int64_t e = l * dims.dvp; e < (l + 1) * dims.dvp; e += kLanes) {
      const Vec sum =
          hn::MulAdd(share, hn::Load(kTag, prefix.values + e), hn::Load(kTag, t.sums.a + e));
      hn::Store(sum, kTag, start.a + e);
    }
  }
  return true;
}

// Adds the keys that weigh_chunk() weighed.
HWY_INLINE void add_weighed(const Dims& dims, std::int64_t width, std::int64_t count,
                            const Operand& values, const CausalTiles& t, const KeySums& sums,
                            Ahead& ahead) {
  add_scaled(sums.s, t.key_sum, width, 1.0F, true);
  gemm(dims.d, values.width, count, by_columns(t.relative, dims.dp), values.data, values.ld,
       {sums.a, dims.dvp, true}, &ahead);
}

// Adds the keys of a chunk to the sums of its segment. Which way it goes depends on the chunk and
// the chunks before it in the segment alone, so that cutting a sequence among workers changes no
// bit.
HWY_INLINE void add_chunk(const Dims& dims, const KeyHead& head, Range chunk, Range next,
                          const CausalTiles& t, const KeySums& sums) {
  const Operand values = chunk_values(dims, head, chunk, dims.dv, t);
  Ahead ahead(stream_of(head.k, next), stream_of(head.v, next));
  if (weigh_chunk(dims, head, chunk, values, t, sums, ahead)) {
    return add_weighed(dims, head.k.width, chunk.size(), values, t, sums, ahead);
  }
  load_chunk_keys(dims, head, chunk, nullptr, t);
  add_keys(dims, t.keys, t.values, chunk.size(), sums);
}

// The chunks of a segment.
HWY_INLINE Grid chunks_of(const Dims& dims, const KeyHead& head, Range segment) {
  return {segment, head.sequence->block_origin, dims.chunk};
}

// starts[i] = the state of all keys before chunk i of a segment; `prefix` is the one before the
// segment.
HWY_INLINE void chunk_starts(const Dims& dims, const KeyHead& head, Range segment,
                             const State& prefix, const CausalTiles& t, const State* starts) {
  reset(t.sums, dims);
  const Grid chunks = chunks_of(dims, head, segment);
  for (std::int64_t i = 0; i < chunks.count(); ++i) {
    join(dims, &prefix, t.sums, starts[i]);
    if (i + 1 < chunks.count()) add_chunk(dims, head, chunks[i], chunks[i + 1], t, t.sums);
  }
}

// The sums over a segment alone.
HWY_INLINE void sum_segment(const Dims& dims, const KeyHead& head, Range segment,
                            const CausalTiles& t, const KeySums& sums) {
  reset(sums, dims);
  const Grid chunks = chunks_of(dims, head, segment);
  for (std::int64_t i = 0; i < chunks.count(); ++i) {
    add_chunk(dims, head, chunks[i], i + 1 < chunks.count() ? chunks[i + 1] : Range{}, t, sums);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#endif
