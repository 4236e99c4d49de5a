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

  // The valid keys of a range: their tokens, exponents u and values. Returns how many there are.
  // `slope` receives f' where the feature map is not exp.
  HWY_INLINE std::int64_t load(const Dims& dims, Range keys, std::int64_t* token, float* u,
                               float* values, float* slope) const {
    if (sequence->mask == nullptr) {
      const std::int64_t count = keys.size();
      for (std::int64_t i = 0; i < count; ++i) token[i] = keys.begin + i;
      load_rows(
          dims, count, [&](std::int64_t i) { return keys.begin + i; }, u, values, slope);
      return count;
    }
    std::int64_t count = 0;
    for (std::int64_t j = keys.begin; j < keys.end; ++j) {
      if (sequence->valid(j)) token[count++] = j;
    }
    load_rows(
        dims, count, [&](std::int64_t i) { return token[i]; }, u, values, slope);
    return count;
  }

 private:
  template <class Token>
  HWY_INLINE void load_rows(const Dims& dims, std::int64_t count, Token&& nth, float* u,
                            float* values, float* slope) const {
    load_exponents(k, count, nth, feature, power, beta, u, dims.dp, slope);
    load_tile(v, count, nth, values, dims.dvp);
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
    load_exponents(
        q, rows.size(), [&](std::int64_t i) { return rows.begin + i; }, feature, power, alpha, a,
        dims.dp, slope);
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

// out = factor * channel * in, added to what is there or not; out may be in.
HWY_INLINE void add_part(float* out, const float* in, const float* channel, float factor,
                         std::int64_t width, bool accumulate) {
  const Vec f = hn::Set(kTag, factor);
  for (std::int64_t c = 0; c < width; c += kLanes) {
    const Vec x = hn::Mul(hn::Load(kTag, in + c), hn::Mul(f, hn::Load(kTag, channel + c)));
    hn::Store(accumulate ? hn::Add(hn::Load(kTag, out + c), x) : x, kTag, out + c);
  }
}

// Copies a state to the caller's views, c in natural units.
HWY_INLINE void save_state(const AttentionSaved& saved, const KeyHead& head, const Dims& dims,
                           const State& state) {
  if (!saved.key_lse.given()) return;
  const Rows c = rows_of(saved.key_lse, head.index, head.head_k, 0);
  const Rows values = rows_of(saved.channel_values, head.index, head.head_k, 0);
  auto* const lse = reinterpret_cast<float*>(c.row(0));
  for (std::int64_t l = 0; l < dims.d; ++l) {
    lse[l] = state.c[l] * kLn2;
    store_row(values, l, state.values + l * dims.dvp);
  }
}

HWY_INLINE void load_state(const AttentionSaved& saved, const KeyHead& head, const Dims& dims,
                           const State& state) {
  const Rows c = rows_of(saved.key_lse, head.index, head.head_k, 0);
  const ConstRows values =
      rows_of(static_cast<ConstView>(saved.channel_values), head.index, head.head_k, 0);
  const auto* const lse = reinterpret_cast<const float*>(c.row(0));
  for (std::int64_t l = 0; l < dims.dp; ++l) state.c[l] = l < dims.d ? lse[l] * kLog2E : kNegInf;
  load_tile(
      values, dims.d, [](std::int64_t i) { return i; }, state.values, dims.dvp);
  std::fill(state.values + dims.d * dims.dvp, state.values + dims.state(), 0.0F);
}

// Joins the sums of a head's key segments in order.
HWY_INLINE void join_segments(const Dims& dims, const KeySums* sums, std::int64_t count,
                              const State& state) {
  if (count == 0) {
    std::fill(state.c, state.c + dims.dp, kNegInf);
    std::fill(state.values, state.values + dims.state(), 0.0F);
  }
  for (std::int64_t i = 0; i < count; ++i) join(dims, i == 0 ? nullptr : &state, sums[i], state);
}

// The sums over a range of keys, from nothing.
HWY_INLINE void sum_keys(const Dims& dims, const KeyHead& head, Range keys, std::int64_t* token,
                         float* exponents, float* values, const KeySums& sums) {
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
