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
    const RowWeights weights(head, dims_, state, tiles.shifted_c);
    const bool direct = p_.kind == Kind::lln && in_place(o);
    const Grid chunks(rows, seq.key_first, dims_.chunk);
    for (std::int64_t i = 0; i < chunks.count(); ++i) {
      const Range chunk = chunks[i];
      const Range next = i + 1 < chunks.count() ? chunks[i + 1] : Range{};
      Ahead ahead(stream_of(head.q, next), stream_of(o, next));
      if (p_.has_lln()) {
        weights.make(chunk, tiles.exponents, tiles.row_factor, nullptr, ahead);
        Product product{tiles.lln, dims_.dvp, false, tiles.row_factor};
        if (direct) {
          product.out = floats_of(o, chunk.begin);
          product.ld = leading_dim(o);
        }
        gemm(chunk.size(), direct ? dims_.dv : dims_.dvp, dims_.d,
             by_rows(tiles.exponents, dims_.dp), state.values, dims_.dvp, product, &ahead);
      }
      if (direct) continue;
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

  void write_rows(const QueryHead& head, Range chunk, const Rows& o, const ForwardTiles& tiles) {
    const auto token = [&](std::int64_t i) { return chunk.begin + i; };
    const auto one = [](std::int64_t) { return 1.0F; };
    if (p_.kind == Kind::lln) {
      return store_tile(o, chunk.size(), token, tiles.lln, dims_.dvp, one);
    }
    if (p_.kind == Kind::lln_diag) {
      for (std::int64_t i = 0; i < chunk.size(); ++i) {
        float* const diag = tiles.diag + i * dims_.dvp;
        add_part(diag, diag, tiles.diag_channel, head.row_weight(diag_weight_, token(i)), dims_.dvp,
                 false);
        add_part(diag, tiles.lln + i * dims_.dvp, tiles.lln_channel,
                 head.row_weight(lln_weight_, token(i)), dims_.dvp, true);
      }
    }
    store_tile(o, chunk.size(), token, tiles.diag, dims_.dvp, one);
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
