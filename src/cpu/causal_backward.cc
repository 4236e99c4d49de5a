// Backward pass of causal LLN, with or without the block-diagonal part. Segments are walked from
// the last to the first, and so are the chunks inside them: each reads the state before it, gives
// dq of its rows, dk and dv of its keys, and adds its rows to what later rows send to earlier keys.
// SPDX-License-Identifier: Apache-2.0
#include "cpu/highway.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/causal_backward.cc"
#include <hwy/foreach_target.h>
// foreach_target first
#include "cpu/causal_leaf_backward-inl.h"
#include "cpu/kernel_run-inl.h"
#include "cpu/targets.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {
namespace {

class CausalBackward : KernelRun<CausalBackwardLayout> {
 public:
  explicit CausalBackward(const Call& call) : KernelRun(call), parts_(call, dims_) {}

  void run() {
    layout_.totals.reset();
    parts_.forget_blocks(layout_.tiles);
    const Wave all = causal_wave();
    if (cuts_sequences(p_, worker_count(call_.parallel))) {
      run_segments(all);
    } else {
      run_heads(all);
    }
    collect_parameters(all);
    layout_.totals.write(call_);
  }

 private:
  // The state after the last token has a gradient: it stands for rows beyond all segments.
  bool has_end() const { return call_.grads.dsaved.given(); }

  // One worker walks a head.
  void run_heads(const Wave& all) {
    const std::int64_t longest = longest_causal_segments(p_);
    for_heads(all, [&](const HeadWork& work, std::int64_t, int worker) {
      const KeyHead head = key_head(work);
      const CausalTiles& t = layout_.causal[worker];
      const CausalGradientTiles& gradient = layout_.gradient[worker];
      State* const states = layout_.states.data() + worker * longest;
      const State* const end = has_end() ? &layout_.ends[worker] : nullptr;
      const std::int64_t count = work.rows.count();
      zero_unused(head, worker);
      begin_states(head, count, states, end);
      for (std::int64_t i = 0; i + (end == nullptr ? 1 : 0) < count; ++i) {
        sum_segment(dims_, head, work.rows[i], t, t.sums);
        join(dims_, &states[i], t.sums, i + 1 == count ? *end : states[i + 1]);
      }
      begin_beyond(head, end, gradient.beyond);
      for (std::int64_t i = count - 1; i >= 0; --i) {
        const bool last = i + 1 == count;
        const float* const c_end = !last ? states[i + 1].c : end != nullptr ? end->c : nullptr;
        walk_back(work, i, {states[i], c_end, c_end == nullptr ? nullptr : &gradient.beyond},
                  LeafOutputs::all, worker);
        add_beyond(states[i].c, c_end, gradient.later, gradient.beyond);
      }
      store_state_gradient(call_, head, dims_, /*c=*/nullptr, gradient.beyond);
    });
  }

  // Every segment by itself: sums over keys, then rows, then keys, with a scan after each of the
  // first two.
  void run_segments(const Wave& all) {
    for_row_segments(all, [&](const HeadWork& work, std::int64_t, std::int64_t i, int worker) {
      if (!has_end() && i + 1 == work.rows.count()) return;
      sum_segment(dims_, key_head(work), work.rows[i], layout_.causal[worker],
                  layout_.key_sums[work.first_row_slot + i]);
    });
    for_heads(all, [&](const HeadWork& work, std::int64_t h, int worker) {
      const KeyHead head = key_head(work);
      zero_unused(head, worker);
      State* const states = layout_.states.data() + work.first_row_slot;
      const State* const end = end_of(h);
      const std::int64_t count = work.rows.count();
      begin_states(head, count, states, end);
      for (std::int64_t i = 0; i + (end == nullptr ? 1 : 0) < count; ++i) {
        join(dims_, &states[i], layout_.key_sums[work.first_row_slot + i],
             i + 1 == count ? *end : states[i + 1]);
      }
    });
    for_row_segments(all, [&](const HeadWork& work, std::int64_t h, std::int64_t i, int worker) {
      walk_back(work, i, boundary(work, h, i, /*with_beyond=*/false), LeafOutputs::rows, worker);
      const QuerySums& own = layout_.query_sums[work.first_row_slot + i];
      const QuerySums& later = layout_.gradient[worker].later;
      std::copy(later.t, later.t + dims_.dp, own.t);
      std::copy(later.dvalues, later.dvalues + dims_.state(), own.dvalues);
    });
    for_heads(all, [&](const HeadWork& work, std::int64_t h, int worker) {
      scan_back(work, end_of(h), worker);
    });
    for_row_segments(all, [&](const HeadWork& work, std::int64_t h, std::int64_t i, int worker) {
      walk_back(work, i, boundary(work, h, i, /*with_beyond=*/true), LeafOutputs::keys, worker);
    });
  }

  // Where sequences are cut: the state of all keys of head h, or null.
  const State* end_of(std::int64_t h) const { return has_end() ? &layout_.ends[h] : nullptr; }

  SegmentBoundary boundary(const HeadWork& work, std::int64_t h, std::int64_t i,
                           bool with_beyond) const {
    const std::int64_t slot = work.first_row_slot + i;
    const State* const after = i + 1 < work.rows.count() ? &layout_.states[slot + 1] : end_of(h);
    return {layout_.states[slot], after == nullptr ? nullptr : after->c,
            after == nullptr || !with_beyond ? nullptr : &layout_.query_sums[slot]};
  }

  // The state before the first segment, which without segments is also the last one.
  void begin_states(const KeyHead& head, std::int64_t count, State* states,
                    const State* end) const {
    if (count > 0) {
      begin_state(call_, head, dims_, states[0]);
    } else if (end != nullptr) {
      begin_state(call_, head, dims_, *end);
    }
  }

  // [G, T] of what is beyond the last segment: nothing, or the gradient of the state there.
  void begin_beyond(const KeyHead& head, const State* end, const QuerySums& beyond) const {
    std::fill(beyond.t, beyond.t + dims_.dp, 0.0F);
    std::fill(beyond.dvalues, beyond.dvalues + dims_.state(), 0.0F);
    if (end != nullptr) add_saved_gradient(call_, head, dims_, *end, beyond);
  }

  // query_sums[i] of the rows of segment i become those of all rows beyond it.
  void scan_back(const HeadWork& work, const State* end, int worker) {
    const KeyHead head = key_head(work);
    const QuerySums& carry = layout_.gradient[worker].beyond;
    const QuerySums& spare = layout_.gradient[worker].later;
    const std::int64_t count = work.rows.count();
    const State* const states = layout_.states.data() + work.first_row_slot;
    begin_beyond(head, end, carry);
    for (std::int64_t i = count - 1; i >= 0; --i) {
      const QuerySums& own = layout_.query_sums[work.first_row_slot + i];
      const State* const after = i + 1 < count ? &states[i + 1] : end;
      std::copy(own.t, own.t + dims_.dp, spare.t);
      std::copy(own.dvalues, own.dvalues + dims_.state(), spare.dvalues);
      std::copy(carry.t, carry.t + dims_.dp, own.t);
      std::copy(carry.dvalues, carry.dvalues + dims_.state(), own.dvalues);
      add_beyond(states[i].c, after == nullptr ? nullptr : after->c, spare, carry);
    }
    store_state_gradient(call_, head, dims_, /*c=*/nullptr, carry);
  }

  // beyond = later + 2^(c_begin - c_end) beyond; without c_end there was nothing beyond.
  void add_beyond(const float* c_begin, const float* c_end, const QuerySums& later,
                  const QuerySums& beyond) const {
    HWY_ALIGN float factor[kMaxDim] = {};
    if (c_end != nullptr) decay_factors(dims_, c_begin, c_end, factor);
    for (std::int64_t l = 0; l < dims_.dp; ++l) {
      const float keep = factor[l];
      float* const row = beyond.dvalues + l * dims_.dvp;
      if (keep == 0.0F) {
        beyond.t[l] = later.t[l];
        std::copy(later.dvalues + l * dims_.dvp, later.dvalues + (l + 1) * dims_.dvp, row);
        continue;
      }
      beyond.t[l] = later.t[l] + keep * beyond.t[l];
      scale_row(row, dims_.dvp, keep);
      add_scaled(row, later.dvalues + l * dims_.dvp, dims_.dvp, 1.0F, true);
    }
  }

  void zero_unused(const KeyHead& keys, int worker) const {
    const Sequence& seq = *keys.sequence;
    float* const zeros = layout_.tiles[worker].lln_d;
    zero_unused_keys(call_, dims_, keys, zeros);
    for (std::int64_t g = 0; g < dims_.group; ++g) {
      const std::int64_t h = keys.head_k * dims_.group + g;
      const Rows dq = rows_of(call_.grads.dq, seq.batch, h, seq.q_begin);
      for (std::int64_t i = 0; i < (call_.in.state.given() ? 0 : seq.key_first); ++i) {
        store_row(dq, i, zeros);
        parts_.zero_token_weights(seq, h, i);
      }
    }
  }

  void walk_back(const HeadWork& work, std::int64_t i, const SegmentBoundary& boundary,
                 LeafOutputs outputs, int worker) const {
    const std::int64_t slot = work.first_row_slot + i;
    const CausalLeafBackward leaf(
        call_, dims_, parts_, key_head(work), outputs, layout_.tiles[worker],
        layout_.causal[worker], layout_.gradient[worker],
        layout_.row_sums.data() + slot * dims_.group, layout_.beta_sums + slot);
    leaf.walk_back(work.rows[i], boundary);
  }

  void collect_parameters(const Wave& all) {
    for (const HeadWork& work : all.heads) {
      for (std::int64_t i = 0; i < work.rows.count(); ++i) {
        const std::int64_t slot = work.first_row_slot + i;
        for (std::int64_t g = 0; g < dims_.group; ++g) {
          layout_.totals.add_rows(work.sequence, work.head_k * dims_.group + g,
                                  layout_.row_sums[slot * dims_.group + g]);
        }
        layout_.totals.add_beta(work.sequence, work.head_k, layout_.beta_sums[slot]);
      }
    }
  }

  BackwardParts parts_;
};

}  // namespace

void causal_backward(const Call& call) { CausalBackward(call).run(); }

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lln::cpu {

LLN_CPU_EXPORT(causal_backward)

std::size_t causal_backward_workspace(const Problem& problem, int workers) {
  return layout_bytes<CausalBackwardLayout>(problem, workers);
}

}  // namespace lln::cpu
#endif
