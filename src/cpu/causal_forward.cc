// Forward pass of causal LLN, with or without the block-diagonal part: chunks are walked in order,
// each reads the state of all keys before it and the exact masked block inside it. An append to a
// decode state is the same walk with that state before the first chunk, with rows or without.
// SPDX-License-Identifier: Apache-2.0
#include "cpu/highway.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/causal_forward.cc"
#include <hwy/foreach_target.h>
// foreach_target first
#include "cpu/causal-inl.h"
#include "cpu/decode-inl.h"
#include "cpu/kernel_run-inl.h"
#include "cpu/targets.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {
namespace {

class CausalForward : KernelRun<CausalForwardLayout> {
 public:
  explicit CausalForward(const Call& call)
      : KernelRun(call),
        lln_weight_(PartWeight::of_lln(call)),
        diag_weight_(PartWeight::of_diag(call)) {}

  void run() {
    const Wave all = causal_wave();
    if (cuts_sequences(p_, worker_count(call_.parallel))) {
      run_segments(all);
    } else {
      run_heads(all);
    }
  }

 private:
  // One worker walks a head and carries the state.
  void run_heads(const Wave& all) {
    for_heads(all, [&](const HeadWork& work, std::int64_t, int worker) {
      const KeyHead head = key_head(work);
      const State& prefix = layout_.prefixes[worker];
      const CausalTiles& t = layout_.causal[worker];
      begin(head, prefix, worker);
      for (std::int64_t i = 0; i < work.rows.count(); ++i) {
        if (call_.in.q.given()) {
          forward_segment(head, work.rows[i], prefix, worker);
        } else {
          sum_segment(dims_, head, work.rows[i], t, t.sums);
        }
        advance(head, work.rows[i], prefix, t.sums, prefix, worker);
      }
      end(head, prefix, worker);
    });
  }

  // The sums of all segments, the states before them, then every segment by itself.
  void run_segments(const Wave& all) {
    // Listed before anything is written: a state that cannot get memory for it stays as it is.
    const std::vector<SegmentTask> tasks =
        segment_tasks(all, [](const HeadWork& work) { return work.rows.count(); });
    for_tasks(all, tasks, [&](const HeadWork& work, std::int64_t, std::int64_t i, int worker) {
      sum_segment(dims_, key_head(work), work.rows[i], layout_.causal[worker],
                  layout_.sums[work.first_row_slot + i]);
    });
    for_heads(all, [&](const HeadWork& work, std::int64_t, int worker) {
      const KeyHead head = key_head(work);
      const std::int64_t count = work.rows.count();
      const State* const states = layout_.states.data() + work.first_row_slot;
      const State& last = layout_.prefixes[worker];
      begin(head, count > 0 ? states[0] : last, worker);
      for (std::int64_t i = 0; i < count; ++i) {
        advance(head, work.rows[i], states[i], layout_.sums[work.first_row_slot + i],
                i + 1 < count ? states[i + 1] : last, worker);
      }
      end(head, last, worker);
    });
    if (!call_.in.q.given()) return;
    for_tasks(all, tasks, [&](const HeadWork& work, std::int64_t, std::int64_t i, int worker) {
      forward_segment(key_head(work), work.rows[i], layout_.states[work.first_row_slot + i],
                      worker);
    });
  }

  bool appends() const { return p_.op == Op::append; }
  DecodeHead decode_head(const KeyHead& keys, int worker) const {
    return {call_, dims_, keys, layout_.decode[worker]};
  }

  // The state before the first segment: nothing, or what has been decoded and the tokens up to
  // key_first, which are taken one by one.
  void begin(const KeyHead& keys, const State& first, int worker) {
    if (!appends()) {
      clear(first, dims_);
      return zero_rows_without_keys(keys, worker);
    }
    DecodeHead head = decode_head(keys, worker);
    const Sequence& seq = *keys.sequence;
    for (std::int64_t i = 0; i < seq.key_first; ++i) head.add(i);
    if (seq.key_first < seq.key_end) head.copy_to(first);
  }

  // The state after a segment from the one before it.
  void advance(const KeyHead& keys, Range segment, const State& before, const KeySums& sums,
               const State& after, int worker) {
    if (!appends()) return join(dims_, &before, sums, after);
    DecodeHead head = decode_head(keys, worker);
    head.add_sums(segment, sums);
    head.copy_to(after);
  }

  void end(const KeyHead& keys, const State& last, int worker) {
    if (!appends()) return save_state(call_.out.saved, keys, dims_, last);
    DecodeHead head = decode_head(keys, worker);
    const Sequence& seq = *keys.sequence;
    head.keep_block(seq.key_end);
    if (call_.in.q.given()) head.zero_rows({seq.q_tokens, p_.tokens});
  }

  // Rows before the first valid key see nothing.
  void zero_rows_without_keys(const KeyHead& keys, int worker) {
    const Sequence& seq = *keys.sequence;
    float* const zeros = layout_.tiles[worker].row;
    std::fill(zeros, zeros + dims_.dvp, 0.0F);
    for (std::int64_t g = 0; g < dims_.group; ++g) {
      const Rows o = rows_of(call_.out.o, seq.batch, keys.head_k * dims_.group + g, seq.q_begin);
      for (std::int64_t i = 0; i < seq.key_first; ++i) store_row(o, i, zeros);
    }
  }

  void forward_segment(const KeyHead& keys, Range segment, const State& prefix, int worker) {
    const CausalTiles& t = layout_.causal[worker];
    walk_segment(dims_, keys, segment, prefix, t, [&](std::int64_t, Range chunk) HWY_ATTR {
      for_each_leaf<false>(dims_, {0, chunk.size()}, t.start, t, 0,
                           [&](const Leaf& leaf, const State& before) HWY_ATTR {
                             if (leaf.has_keys) make_relative(dims_, leaf, t);
                             for (std::int64_t g = 0; g < dims_.group; ++g) {
                               forward_leaf(keys,
                                            QueryHead(call_, keys, keys.head_k * dims_.group + g),
                                            chunk.begin, leaf, before, worker);
                             }
                           });
    });
  }

  void forward_leaf(const KeyHead& keys, const QueryHead& head, std::int64_t chunk_begin,
                    const Leaf& leaf, const State& before, int worker) {
    const CausalTiles& t = layout_.causal[worker];
    const ForwardTiles& tiles = layout_.tiles[worker];
    const std::int64_t count = leaf.rows.size();
    const Range rows{chunk_begin + leaf.rows.begin, chunk_begin + leaf.rows.end};
    make_weights(dims_, head, rows.begin, leaf, before, nullptr, t);
    // Probabilities before the products, so that no product overflows.
    for (std::int64_t i = 0; i < count; ++i) {
      scale_row(t.prefix_weights + i * dims_.dp, dims_.dp, t.prefix_factor[i]);
    }
    gemm(count, dims_.dvp, dims_.d, by_rows(t.prefix_weights, dims_.dp), before.values, dims_.dvp,
         tiles.lln, dims_.dvp, false);
    if (leaf.has_keys) {
      const std::int64_t ld = padded(count);
      for (std::int64_t i = 0; i < count; ++i)
        scale_row(t.products + i * ld, ld, t.chunk_factor[i]);
      multiply_lower(count, dims_.dvp, t.products, t.values + leaf.rows.begin * dims_.dvp,
                     tiles.lln, true);
    }
    if (p_.kind == Kind::lln_diag) {
      const ScoreHead scores = head.scores(call_, keys, dims_, tiles.scores[0]);
      for_each_block(scores, rows, [&](Range part, Range visible_keys) HWY_ATTR {
        softmax_rows(scores, part, visible_keys,
                     tiles.diag + (part.begin - rows.begin) * dims_.dvp);
      });
      head.load_channels(lln_weight_, dims_, tiles.lln_channel);
      head.load_channels(diag_weight_, dims_, tiles.diag_channel);
    }
    const Sequence& seq = *keys.sequence;
    const Rows o = rows_of(call_.out.o, seq.batch, head.h, seq.q_begin);
    for (std::int64_t i = 0; p_.kind == Kind::lln_diag && i < count; ++i) {
      float* const lln = tiles.lln + i * dims_.dvp;
      add_part(lln, lln, tiles.lln_channel, head.row_weight(lln_weight_, rows.begin + i), dims_.dvp,
               false);
      add_part(lln, tiles.diag + i * dims_.dvp, tiles.diag_channel,
               head.row_weight(diag_weight_, rows.begin + i), dims_.dvp, true);
    }
    store_tile(
        o, count, [&](std::int64_t i) { return rows.begin + i; }, tiles.lln, dims_.dvp,
        [](std::int64_t) { return 1.0F; });
  }

  PartWeight lln_weight_, diag_weight_;
};

}  // namespace

void causal_forward(const Call& call) { CausalForward(call).run(); }

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lln::cpu {

LLN_CPU_EXPORT(causal_forward)

std::size_t causal_forward_workspace(const Problem& problem, int workers) {
  return layout_bytes<CausalForwardLayout>(problem, workers);
}

}  // namespace lln::cpu
#endif
