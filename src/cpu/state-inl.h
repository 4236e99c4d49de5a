// States in the caller's memory: the one that is given, the one that is saved, and their gradients.
// A state c, C has c in natural units there. What later rows want of the keys of a state is [G, T],
// relative to its c (docs/theory.md): the state's own gradient is such a pair, and the gradient of
// a given state is read off one.
// SPDX-License-Identifier: Apache-2.0
#if defined(LLN_CPU_STATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LLN_CPU_STATE_INL_H_
#undef LLN_CPU_STATE_INL_H_
#else
#define LLN_CPU_STATE_INL_H_
#endif

#include "cpu/head-inl.h"
#include "cpu/layout.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {

HWY_INLINE void clear(const State& state, const Dims& dims) {
  std::fill(state.c, state.c + dims.dp, kNegInf);
  std::fill(state.values, state.values + dims.state(), 0.0F);
}

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

// One key head of a state, or of the gradient of one, in the caller's memory.
struct StateRows {
  StateRows(const AttentionState& state, const KeyHead& head)
      : lse(reinterpret_cast<const float*>(
            rows_of(state.key_lse, head.index, head.head_k, 0).row(0))),
        values(rows_of(state.channel_values, head.index, head.head_k, 0)) {}
  const float* lse;
  ConstRows values;
};

// c of a channel in the caller's memory, in units of log2. Like the exponents of keys it is kept
// within the limit, where f32 would overflow; -inf says that there are no keys and stays.
HWY_INLINE float log2_lse(float lse) {
  return lse == kNegInf ? kNegInf : lln::clamp_exponent(lse * kLog2E);
}

// Channels without keys are empty whatever their values are.
HWY_INLINE void load_state(const AttentionState& from, const KeyHead& head, const Dims& dims,
                           const State& state) {
  const StateRows rows(from, head);
  load_tile(rows.values, dims.d, std::int64_t{0}, state.values, dims.dvp);
  for (std::int64_t l = 0; l < dims.dp; ++l) {
    state.c[l] = l < dims.d ? log2_lse(rows.lse[l]) : kNegInf;
    if (state.c[l] != kNegInf) continue;
    std::fill(state.values + l * dims.dvp, state.values + (l + 1) * dims.dvp, 0.0F);
  }
}

// The state before the first key of k: the given one, or nothing.
HWY_INLINE void begin_state(const Call& call, const KeyHead& head, const Dims& dims,
                            const State& state) {
  if (!call.in.state.given()) return clear(state, dims);
  load_state(call.in.state, head, dims, state);
}

// The state of all keys from the sums of a head's key segments, joined in order.
HWY_INLINE void join_segments(const Call& call, const KeyHead& head, const Dims& dims,
                              const KeySums* sums, std::int64_t count, const State& state) {
  const bool from_nothing = !call.in.state.given();
  if (!from_nothing || count == 0) begin_state(call, head, dims, state);
  for (std::int64_t i = 0; i < count; ++i) {
    join(dims, from_nothing && i == 0 ? nullptr : &state, sums[i], state);
  }
}

// a . b over padded channels.
HWY_INLINE float dot(const float* HWY_RESTRICT a, const float* HWY_RESTRICT b, std::int64_t width) {
  Vec sum = hn::Zero(kTag);
  for (std::int64_t c = 0; c < width; c += kLanes) {
    sum = hn::MulAdd(hn::Load(kTag, a + c), hn::Load(kTag, b + c), sum);
  }
  return reduce_sum(sum);
}

// Adds the gradient of the saved state (c, C) to what rows want of its keys: G += dC and
// T += C . dC - dc.
HWY_INLINE void add_saved_gradient(const Call& call, const KeyHead& head, const Dims& dims,
                                   const State& state, const QuerySums& sums) {
  if (!call.grads.dsaved.given()) return;
  const StateRows gradient(call.grads.dsaved, head);
  HWY_ALIGN float row[kMaxDim];
  for (std::int64_t l = 0; l < dims.d; ++l) {
    if (state.c[l] == kNegInf) continue;
    load_tile(gradient.values, 1, l, row, dims.dvp);
    add_scaled(sums.dvalues + l * dims.dvp, row, dims.dvp, 1.0F, true);
    sums.t[l] += dot(row, state.values + l * dims.dvp, dims.dvp) - gradient.lse[l];
  }
}

// The gradient of the given state (c0, C0) from [G, T] of all rows relative to `c`, with the share
// e = 2^(c0 - c) of its keys: dC0 = e G and dc0 = e (C0 . G - T). A null `c` is c0 itself.
HWY_INLINE void store_state_gradient(const Call& call, const KeyHead& head, const Dims& dims,
                                     const float* c, const QuerySums& sums) {
  const AttentionSaved& out = call.grads.dstate;
  if (!out.key_lse.given()) return;
  const StateRows state(call.in.state, head);
  const Rows dlse = rows_of(out.key_lse, head.index, head.head_k, 0);
  const Rows dvalues = rows_of(out.channel_values, head.index, head.head_k, 0);
  HWY_ALIGN float row[kMaxDim];
  for (std::int64_t l = 0; l < dims.d; ++l) {
    const float own = log2_lse(state.lse[l]);
    float dc = 0;
    if (own == kNegInf) {
      std::fill(row, row + dims.dvp, 0.0F);
    } else {
      const float share = c == nullptr ? 1.0F : std::exp2(own - c[l]);
      const float* const wanted = sums.dvalues + l * dims.dvp;
      load_tile(state.values, 1, l, row, dims.dvp);
      dc = share * (dot(row, wanted, dims.dvp) - sums.t[l]);
      add_scaled(row, wanted, dims.dvp, share, false);
    }
    reinterpret_cast<float*>(dlse.row(0))[l] = dc;
    store_row(dvalues, l, row);
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#endif
