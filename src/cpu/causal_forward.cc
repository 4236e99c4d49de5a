// Forward pass of causal LLN, with or without the block-diagonal part: chunks are walked in order,
// each reads the state of all keys before it and the exact masked block inside it.
// SPDX-License-Identifier: Apache-2.0
#include "cpu/highway.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/causal_forward.cc"
#include <hwy/foreach_target.h>
// foreach_target first
#include "cpu/causal-inl.h"
#include "cpu/targets.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {
namespace {

class CausalForward {
 public:
  explicit CausalForward(const Call& call)
      : call_(call),
        p_(call.problem),
        dims_(p_),
        arena_(call.workspace),
        layout_(arena_, p_, dims_, worker_count(call.parallel)),
        lln_weight_(PartWeight::of_lln(call)),
        diag_weight_(PartWeight::of_diag(call)) {}

  void run() {
    constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();
    const std::int64_t pairs = static_cast<std::int64_t>(call_.sequences.size()) * p_.heads_k;
    std::int64_t next = 0;
    const Wave all = take_wave(next, pairs, kUnlimited, kUnlimited, kUnlimited,
                               [&](std::int64_t pair) { return causal_work(call_, dims_, pair); });
    if (cuts_sequences(p_, worker_count(call_.parallel))) {
      run_segments(all);
    } else {
      run_heads(all);
    }
  }

 private:
  KeyHead key_head(const HeadWork& work) const { return {call_, work.sequence, work.head_k}; }

  void run_heads(const Wave& all) {
    parallel_for(call_.parallel, static_cast<std::int64_t>(all.heads.size()),
                 [&](std::int64_t h, int worker) {
                   const HeadWork& work = all.heads[static_cast<std::size_t>(h)];
                   const KeyHead head = key_head(work);
                   const State& prefix = layout_.prefixes[static_cast<std::size_t>(worker)];
                   const CausalTiles& t = layout_.causal[static_cast<std::size_t>(worker)];
                   clear(prefix, dims_);
                   zero_rows_without_keys(head, worker);
                   for (std::int64_t i = 0; i < work.rows.count(); ++i) {
                     forward_segment(head, work.rows[i], prefix, worker);
                     join(dims_, &prefix, t.sums, prefix);
                   }
                   save_state(call_.out.saved, head, dims_, prefix);
                 });
  }

  void run_segments(const Wave& all) {
    const auto tasks = segment_tasks(all, [](const HeadWork& w) { return w.rows.count(); });
    const auto for_tasks = [&](auto&& body) {
      parallel_for(call_.parallel, static_cast<std::int64_t>(tasks.size()),
                   [&](std::int64_t t, int worker) {
                     const SegmentTask& task = tasks[static_cast<std::size_t>(t)];
                     const HeadWork& work = all.heads[static_cast<std::size_t>(task.head)];
                     body(work, task.segment, worker);
                   });
    };
    for_tasks([&](const HeadWork& work, std::int64_t segment, int worker) {
      const CausalTiles& t = layout_.causal[static_cast<std::size_t>(worker)];
      sum_segment(dims_, key_head(work), work.rows[segment], t,
                  layout_.sums[work.first_row_slot + segment]);
    });
    parallel_for(call_.parallel, static_cast<std::int64_t>(all.heads.size()),
                 [&](std::int64_t h, int worker) {
                   const HeadWork& work = all.heads[static_cast<std::size_t>(h)];
                   const KeyHead head = key_head(work);
                   const State& last = layout_.prefixes[static_cast<std::size_t>(worker)];
                   scan_segments(dims_, &layout_.sums[work.first_row_slot],
                                 &layout_.states[work.first_row_slot], work.rows.count(), last);
                   zero_rows_without_keys(head, worker);
                   save_state(call_.out.saved, head, dims_, last);
                 });
    for_tasks([&](const HeadWork& work, std::int64_t segment, int worker) {
      forward_segment(key_head(work), work.rows[segment],
                      layout_.states[work.first_row_slot + segment], worker);
    });
  }

  // Rows before the first valid key see nothing.
  void zero_rows_without_keys(const KeyHead& keys, int worker) {
    const Sequence& seq = *keys.sequence;
    float* const zeros = layout_.tiles[static_cast<std::size_t>(worker)].row;
    std::fill(zeros, zeros + dims_.dvp, 0.0F);
    for (std::int64_t g = 0; g < dims_.group; ++g) {
      const Rows o = rows_of(call_.out.o, seq.batch, keys.head_k * dims_.group + g, seq.q_begin);
      for (std::int64_t i = 0; i < seq.key_first; ++i) store_row(o, i, zeros);
    }
  }

  void forward_segment(const KeyHead& keys, Range segment, const State& prefix, int worker) {
    const CausalTiles& t = layout_.causal[static_cast<std::size_t>(worker)];
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
    const CausalTiles& t = layout_.causal[static_cast<std::size_t>(worker)];
    const ForwardTiles& tiles = layout_.tiles[static_cast<std::size_t>(worker)];
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

  const Call& call_;
  const Problem& p_;
  const Dims dims_;
  Arena arena_;
  CausalForwardLayout layout_;
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
  Arena arena(nullptr);
  const CausalForwardLayout layout(arena, problem, Dims(problem), workers);
  return arena.used();
}

}  // namespace lln::cpu
#endif
