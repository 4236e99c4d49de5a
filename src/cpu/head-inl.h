// One query head of one sequence: its rows in the caller's memory, its exponents, its weights.
// SPDX-License-Identifier: Apache-2.0
#if defined(LLN_CPU_HEAD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LLN_CPU_HEAD_INL_H_
#undef LLN_CPU_HEAD_INL_H_
#else
#define LLN_CPU_HEAD_INL_H_
#endif

#include "cpu/lln-inl.h"
#include "cpu/softmax-inl.h"
#include "cpu/work.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {

// The rows of a range, to be fetched ahead.
template <class AnyRows>
HWY_INLINE Ahead::Stream stream_of(const AnyRows& rows, Range range) {
  const std::int64_t bytes = rows.width * static_cast<std::int64_t>(size_of(rows.dtype));
  const std::int64_t lines = ceil_div(bytes, Ahead::kLine);
  return {rows.row(range.begin), lines, rows.stride - lines * Ahead::kLine, range.size()};
}

// Key head `head_k` of a sequence.
struct KeyHead {
  KeyHead(const Call& call, std::int64_t s, std::int64_t head)
      : sequence(&call.sequences[static_cast<std::size_t>(s)]),
        index(s),
        head_k(head),
        k(rows_of(call.in.k, sequence->batch, head, sequence->k_begin)),
        v(rows_of(call.in.v, sequence->batch, head, sequence->k_begin)),
        feature(call.problem.feature),
        power(call.problem.power) {
    if (call.problem.has_lln()) beta = static_cast<float>(element(call.in.beta, s, head, 0, 0));
  }

  const Sequence* sequence;
  std::int64_t index;  // of the sequence
  std::int64_t head_k;
  ConstRows k, v;
  Feature feature;
  float power;
  float beta = 1;

  // The valid keys of a range; returns how many there are.
  HWY_INLINE std::int64_t select(Range keys, std::int64_t* token) const {
    std::int64_t count = 0;
    if (sequence->mask == nullptr) {
      for (std::int64_t j = keys.begin; j < keys.end; ++j) token[count++] = j;
    } else {
      for (std::int64_t j = keys.begin; j < keys.end; ++j) {
        if (sequence->valid(j)) token[count++] = j;
      }
    }
    return count;
  }

  // The same with their exponents u and values. `slope` receives f' where the feature map is not
  // exp.
  HWY_INLINE std::int64_t load(const Dims& dims, Range keys, std::int64_t* token, float* u,
                               float* values, float* slope) const {
    const std::int64_t count = select(keys, token);
    load_exponents(k, count, token, feature, power, beta, u, dims.dp, slope);
    load_tile(v, count, token, values, dims.dvp);
    return count;
  }

  // The values of the `count` keys that select() took from a range: where the caller has them, if
  // no key between them was left out, or in `tile`.
  template <class Words = Floats>
  HWY_INLINE Operand values(const Dims& dims, Range keys, std::int64_t count,
                            const std::int64_t* token, float* tile) const {
    if constexpr (Words::kPerWord == 2) {
      load_pairs(v, count, token, tile, dims.dvp);
      return {tile, dims.dvp, dims.dvp};
    }
    if (in_place(v) && count == keys.size()) {
      return {floats_of(v, keys.begin), leading_dim(v), v.width};
    }
    load_tile(v, count, token, tile, dims.dvp);
    return {tile, dims.dvp, dims.dvp};
  }
};

// Query head `h` of a sequence.
struct QueryHead {
  QueryHead(const Call& call, const KeyHead& keys, std::int64_t head)
      : sequence(keys.sequence),
        h(head),
        q(rows_of(call.in.q, sequence->batch, h, sequence->q_begin)),
        feature(keys.feature),
        power(keys.power) {
    if (call.problem.has_lln()) {
      alpha = static_cast<float>(element(call.in.alpha, keys.index, h, 0, 0));
    }
  }

  const Sequence* sequence;
  std::int64_t h;
  ConstRows q;
  Feature feature;
  float power;
  float alpha = 1;

  HWY_INLINE void load(const Dims& dims, Range rows, float* a, float* slope) const {
    load_exponents(q, rows.size(), rows.begin, feature, power, alpha, a, dims.dp, slope);
  }

  // The weight of a part for a row of this head, 1 where the channels carry it.
  float row_weight(const PartWeight& weight, std::int64_t row) const {
    return weight.per_channel() ? 1.0F : weight.at(sequence->batch, h, sequence->q_begin + row);
  }

  // The weights of a part for the channels of this head, all 1 where the rows carry them.
  void load_channels(const PartWeight& weight, const Dims& dims, float* out) const {
    for (std::int64_t c = 0; c < dims.dvp; ++c) {
      out[c] = weight.per_channel() && c < dims.dv ? weight.at(sequence->batch, h, 0, c) : 1.0F;
    }
  }

  ScoreHead scores(const Call& call, const KeyHead& keys, const Dims& dims,
                   const ScoreTiles& tiles) const {
    return {sequence, &dims,  &tiles, call.problem.causal, call.problem.diag_block,
            q,        keys.k, keys.v};
  }
};

// The weights of the channels for rows of a query head that read a state: 2^(a + c), scaled row by
// row, and the factors that make them probabilities. Made in one pass over the caller's rows where
// the feature map is exp; the careful way, with the maximum of each row, where that pass cannot be
// trusted.
class RowWeights {
 public:
  // `shifted` [dp] is memory for c minus its maximum.
  RowWeights(const QueryHead& head, const Dims& dims, const State& state, float* shifted)
      : head_(head), dims_(dims), c_(state.c), shifted_(shifted) {
    if (c_ == nullptr) return;  // no LLN part
    large_ = !all_within(state.values, dims.state(), kLargeValue);
    fast_ = !large_ && are_exponents(head.q, head.feature) && shift_channels(dims, c_, shifted);
  }

  // weights [rows, dp], factor [rows] with room for padded(rows), in one pass. False where it
  // cannot be trusted.
  template <class Words>
  HWY_INLINE bool make_fast(Range rows, float* weights, float* factor, Ahead& ahead) const {
    if (!fast_) return false;
    weigh_rows<Words>({head_.q, log2_scale(head_.alpha)}, rows.begin, rows.size(), shifted_,
                      weights, dims_.dp / Words::kPerWord, factor, ahead);
    if (!row_sums_are_safe(factor, rows.size())) return false;
    invert_sums(rows.size(), factor);
    return true;
  }

  // The same for all rows. `slope` receives f' where the feature map is not exp.
  HWY_INLINE void make(Range rows, float* weights, float* factor, float* slope,
                       Ahead& ahead) const {
    if (make_fast<Floats>(rows, weights, factor, ahead)) return;
    const std::int64_t count = rows.size();
    HWY_ALIGN float high[kMaxChunk];
    head_.load(dims_, rows, weights, slope);
    channel_weights(count, dims_, weights, c_, weights, high, factor);
    invert_sums(count, factor);
    for (std::int64_t i = 0; large_ && i < count; ++i) {  // lest a product overflow
      scale_row(weights + i * dims_.dp, dims_.dp, factor[i]);
      factor[i] = 1;
    }
  }

 private:
  const QueryHead& head_;
  const Dims& dims_;
  const float* c_;
  float* shifted_;
  bool large_ = false;
  bool fast_ = false;
};

// out = factor * channel * in, added to what is there or not; out may be in.
HWY_INLINE void add_part(float* out, const float* in, const float* channel, float factor,
                         std::int64_t width, bool accumulate) {
  const Vec f = hn::Set(kTag, factor);
  for (std::int64_t c = 0; c < width; c += kLanes) {
    const Vec x = hn::Mul(hn::Load(kTag, in + c), hn::Mul(f, hn::Load(kTag, channel + c)));
    hn::Store(accumulate ? hn::Add(hn::Load(kTag, out + c), x) : x, kTag, out + c);
  }
}

// The sums over a range of keys, from nothing, in one pass over the caller's rows. False where they
// cannot be trusted.
template <class Words>
HWY_INLINE bool sum_keys_fast(const Dims& dims, const KeyHead& head, Range keys,
                              std::int64_t* token, float* weights, float* values,
                              const KeySums& sums) {
  reset(sums, dims);
  const Exponents u{head.k, log2_scale(head.beta)};
  const std::int64_t width = head.k.width;
  HWY_ALIGN float tile_sum[kMaxDim];
  const Grid chunks(keys, keys.begin, dims.chunk);
  for (std::int64_t i = 0; i < chunks.count(); ++i) {
    const std::int64_t count = head.select(chunks[i], token);
    if (count == 0) continue;
    const Range next = i + 1 < chunks.count() ? chunks[i + 1] : Range{};
    Ahead ahead(stream_of(head.k, next), stream_of(head.v, next));
    if (!weigh_against_reference<Words>(dims, u, count, token, kUnlimitedRaise, sums, weights,
                                        tile_sum, ahead)) {
      return false;
    }
    add_scaled(sums.s, tile_sum, width, 1.0F, true);
    const Operand v = head.values<Words>(dims, chunks[i], count, token, values);
    gemm<Words>(dims.d, v.width, ceil_div(count, Words::kPerWord), by_columns(weights, dims.dp),
                v.data, v.ld, {sums.a, dims.dvp, true}, &ahead);
  }
  return sums.s[0] == 0 || sums_are_safe(dims, width, sums);
}

// The sums over a range of keys, from nothing. `pairs`: products of bf16 pairs, where they can be
// trusted.
HWY_INLINE void sum_keys(const Dims& dims, const KeyHead& head, Range keys, bool pairs,
                         std::int64_t* token, float* exponents, float* values,
                         const KeySums& sums) {
  if (are_exponents(head.k, head.feature)) {
    const bool trusted =
        pairs ? sum_keys_fast<Pairs>(dims, head, keys, token, exponents, values, sums)
              : sum_keys_fast<Floats>(dims, head, keys, token, exponents, values, sums);
    if (trusted) return;
  }
  reset(sums, dims);
  const Grid chunks(keys, keys.begin, dims.chunk);
  for (std::int64_t i = 0; i < chunks.count(); ++i) {
    const std::int64_t count = head.load(dims, chunks[i], token, exponents, values, nullptr);
    add_keys(dims, exponents, values, count, sums);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#endif
