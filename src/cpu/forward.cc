// Forward pass of everything but causal LLN: one pass over keys and values that leaves the state of
// each head, one pass over queries that reads it. The block-diagonal part joins the second pass.
// SPDX-License-Identifier: Apache-2.0
#include "cpu/highway.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/forward.cc"
#include <hwy/foreach_target.h>
// foreach_target first
#include "cpu/kernel_run-inl.h"
#include "cpu/targets.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {
namespace {

class Forward : KernelRun<ForwardLayout> {
 public:
  explicit Forward(const Call& call)
      : KernelRun(call),
        lln_weight_(PartWeight::of_lln(call)),
        diag_weight_(PartWeight::of_diag(call)) {}

  void run() {
    const bool lln = p_.has_lln();
    for (std::int64_t next = 0; next < pairs();) {
      const Wave wave =
          take_wave(next, pairs(), lln ? std::ssize(layout_.states) : kUnlimited,
                    lln ? std::ssize(layout_.sums) : kUnlimited, kUnlimited,
                    [&](std::int64_t pair) { return bidirectional_work(call_, dims_, pair); });
      if (lln) build_states(wave);
      read_rows(wave);
    }
  }

 private:
  void build_states(const Wave& wave) {
    for_key_segments(wave, [&](const HeadWork& work, std::int64_t, std::int64_t i, int worker) {
      const ForwardTiles& tiles = layout_.tiles[worker];
      sum_keys(dims_, key_head(work), work.keys[i], tiles.token, tiles.exponents, tiles.values,
               layout_.sums[work.first_key_slot + i]);
    });
    for_heads(wave, [&](const HeadWork& work, std::int64_t h, int) {
      const State& state = layout_.states[h];
      join_segments(dims_, &layout_.sums[work.first_key_slot], work.keys.count(), state);
      save_state(call_.out.saved, key_head(work), dims_, state);
    });
  }

  void read_rows(const Wave& wave) {
    for_segments(
        wave, [&](const HeadWork& work) { return work.rows.count() * dims_.group; },
        [&](const HeadWork& work, std::int64_t h, std::int64_t i, int worker) {
          const std::int64_t segments = work.rows.count();
          const State state = p_.has_lln() ? layout_.states[h] : State{};
          read_segment(work, work.head_k * dims_.group + i / segments, work.rows[i % segments],
                       state, layout_.tiles[worker]);
        });
  }

  void read_segment(const HeadWork& work, std::int64_t h, Range rows, const State& state,
                    const ForwardTiles& tiles) {
    const KeyHead keys = key_head(work);
    const QueryHead head(call_, keys, h);
    const Sequence& seq = *keys.sequence;
    const Rows o = rows_of(call_.out.o, seq.batch, h, seq.q_begin);
    head.load_channels(lln_weight_, dims_, tiles.lln_channel);
    head.load_channels(diag_weight_, dims_, tiles.diag_channel);
    const bool large = p_.has_lln() && largest_magnitude(state.values, dims_.state()) > kLargeValue;
    const Grid chunks(rows, seq.key_first, dims_.chunk);
    for (std::int64_t i = 0; i < chunks.count(); ++i) {
      const Range chunk = chunks[i];
      if (p_.has_lln()) read_state(head, chunk, state, large, tiles);
      if (p_.kind != Kind::lln) {
        const ScoreHead scores = head.scores(call_, keys, dims_, tiles.scores[0]);
        for_each_block(scores, chunk, [&](Range part, Range visible_keys) {
          softmax_rows(scores, part, visible_keys,
                       tiles.diag + (part.begin - chunk.begin) * dims_.dvp);
        });
      }
      write_rows(head, chunk, o, tiles);
    }
  }

  // tiles.lln[chunk, dvp] = softmax over channels of (alpha q + c), times C; its rows are still to
  // be multiplied by tiles.row_sum.
  void read_state(const QueryHead& head, Range chunk, const State& state, bool large,
                  const ForwardTiles& tiles) {
    const std::int64_t count = chunk.size();
    head.load(dims_, chunk, tiles.exponents, nullptr);
    channel_weights(count, dims_, tiles.exponents, state.c, tiles.exponents, tiles.row_high,
                    tiles.row_sum);
    invert_sums(count, tiles.row_sum);
    for (std::int64_t i = 0; large && i < count; ++i) {  // before the product, lest it overflow
      scale_row(tiles.exponents + i * dims_.dp, dims_.dp, tiles.row_sum[i]);
      tiles.row_sum[i] = 1;
    }
    gemm(count, dims_.dvp, dims_.d, by_rows(tiles.exponents, dims_.dp), state.values, dims_.dvp,
         tiles.lln, dims_.dvp, false);
  }

  void write_rows(const QueryHead& head, Range chunk, const Rows& o, const ForwardTiles& tiles) {
    const auto token = [&](std::int64_t i) { return chunk.begin + i; };
    if (p_.kind == Kind::lln) {
      return store_tile(o, chunk.size(), token, tiles.lln, dims_.dvp,
                        [&](std::int64_t i) { return tiles.row_sum[i]; });
    }
    if (p_.kind == Kind::lln_diag) {
      for (std::int64_t i = 0; i < chunk.size(); ++i) {
        float* const diag = tiles.diag + i * dims_.dvp;
        add_part(diag, diag, tiles.diag_channel, head.row_weight(diag_weight_, token(i)), dims_.dvp,
                 false);
        add_part(diag, tiles.lln + i * dims_.dvp, tiles.lln_channel,
                 tiles.row_sum[i] * head.row_weight(lln_weight_, token(i)), dims_.dvp, true);
      }
    }
    store_tile(o, chunk.size(), token, tiles.diag, dims_.dvp, [](std::int64_t) { return 1.0F; });
  }

  PartWeight lln_weight_, diag_weight_;
};

}  // namespace

void forward(const Call& call) { Forward(call).run(); }

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lln::cpu {

LLN_CPU_EXPORT(forward)

std::size_t forward_workspace(const Problem& problem, int workers) {
  return layout_bytes<ForwardLayout>(problem, workers);
}

}  // namespace lln::cpu
#endif
