// Forward pass of everything but causal LLN: one pass over keys and values that leaves the state of
// each head, one pass over queries that reads it. The block-diagonal part joins the second pass.
// SPDX-License-Identifier: Apache-2.0
#include "cpu/highway.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/forward.cc"
#include <hwy/foreach_target.h>
// foreach_target first
#include "cpu/kernel_run-inl.h"
#include "cpu/output-inl.h"
#include "cpu/targets.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {
namespace {

class Forward : KernelRun<ForwardLayout> {
 public:
  // `pairs`: products of bf16 pairs.
  Forward(const Call& call, bool pairs)
      : KernelRun(call), output_(call, dims_, pairs), pairs_(pairs) {}

  void run() {
    const bool lln = p_.has_lln();
    for (std::int64_t next = 0; next < key_heads();) {
      const Wave wave =
          take_wave(next, key_heads(), lln ? std::ssize(layout_.states) : kUnlimited,
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
      sum_keys(dims_, key_head(work), work.keys[i], pairs_, tiles.token, tiles.exponents,
               tiles.values, layout_.sums[work.first_key_slot + i]);
    });
    for_heads(wave, [&](const HeadWork& work, std::int64_t h, int) {
      const State& state = layout_.states[h];
      const KeyHead head = key_head(work);
      join_segments(call_, head, dims_, &layout_.sums[work.first_key_slot], work.keys.count(),
                    state);
      save_state(call_.out.saved, head, dims_, state);
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
    const Rows o = output_.rows(head);
    const RowWeights weights(head, dims_, state, tiles.shifted_c);
    if (pairs_ && p_.has_lln()) {
      join_rows<Pairs>(state.values, dims_.dvp, dims_.d, dims_.dvp, tiles.state_pairs);
    }
    const Grid chunks(rows, keys.sequence->block_origin, dims_.chunk);
    for (std::int64_t i = 0; i < chunks.count(); ++i) {
      const Range chunk = chunks[i];
      const Range next = i + 1 < chunks.count() ? chunks[i + 1] : Range{};
      Product target = output_.target(head, chunk, tiles);
      if (p_.has_lln()) {
        Ahead ahead(stream_of(head.q, next), stream_of(o, next));
        target.row_factor = tiles.row_factor;
        if (pairs_ && weights.make_fast<Pairs>(chunk, tiles.exponents, tiles.row_factor, ahead)) {
          multiply<Pairs>(head, chunk, tiles.state_pairs, target, tiles, ahead);
        } else {
          weights.make(chunk, tiles.exponents, tiles.row_factor, nullptr, ahead);
          multiply<Floats>(head, chunk, state.values, target, tiles, ahead);
        }
      }
      output_.finish(keys, head, chunk, target, tiles);
    }
  }

  // Weights of a chunk times the state, both in words.
  template <class Words>
  void multiply(const QueryHead& head, Range chunk, const float* state, const Product& target,
                const ForwardTiles& tiles, Ahead& ahead) const {
    output_.weigh_lln(head, chunk, tiles.row_factor);
    gemm<Words>(chunk.size(), output_.width(), dims_.d / Words::kPerWord,
                by_rows(tiles.exponents, dims_.dp / Words::kPerWord), state, dims_.dvp, target,
                &ahead);
  }

  OutputRows output_;
  bool pairs_;
};

}  // namespace

void forward(const Call& call) { Forward(call, /*pairs=*/false).run(); }
void forward_pairs(const Call& call) { Forward(call, /*pairs=*/true).run(); }

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lln::cpu {

LLN_CPU_EXPORT(forward)
LLN_CPU_EXPORT(forward_pairs)

std::size_t forward_workspace(const Problem& problem, int workers) {
  return layout_bytes<ForwardLayout>(problem, workers);
}

}  // namespace lln::cpu
#endif
