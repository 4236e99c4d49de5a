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
#include "cpu/output-inl.h"
#include "cpu/targets.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {
namespace {

class CausalForward : KernelRun<CausalForwardLayout> {
 public:
  explicit CausalForward(const Call& call) : KernelRun(call), output_(call, dims_) {}

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

  // The state before the first segment: the given one or nothing, or what has been decoded and the
  // tokens up to key_first, which are taken one by one.
  void begin(const KeyHead& keys, const State& first, int worker) {
    if (!appends()) {
      begin_state(call_, keys, dims_, first);
      if (!call_.in.state.given()) zero_rows_without_keys(keys, worker);
      return;
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

  QueryHead query_head(const KeyHead& keys, std::int64_t g) const {
    return {call_, keys, keys.head_k * dims_.group + g};
  }

  // Rows of a segment; afterwards the worker's t.sums holds its keys.
  void forward_segment(const KeyHead& keys, Range segment, const State& prefix, int worker) {
    const CausalTiles& t = layout_.causal[worker];
    const bool prefix_fits = all_within(prefix.values, dims_.state(), kLargeValue);
    reset(t.sums, dims_);
    const Grid chunks = chunks_of(dims_, keys, segment);
    for (std::int64_t i = 0; i < chunks.count(); ++i) {
      const Range chunk = chunks[i];
      const Range next = i + 1 < chunks.count() ? chunks[i + 1] : Range{};
      const Operand values = chunk_values(dims_, keys, chunk, output_.width(), t);
      Ahead ahead(stream_of(keys.k, next), stream_of(keys.v, next));
      const bool weighed = weigh_chunk(dims_, keys, chunk, values, t, t.sums, ahead);
      if (!(weighed && prefix_fits && rows_fast(keys, chunk, next, values, prefix, worker))) {
        rows_carefully(keys, chunk, prefix, worker);
        if (!weighed) {
          add_keys(dims_, t.keys, t.values, chunk.size(), t.sums);
          continue;
        }
        weigh_chunk(dims_, keys, chunk, values, t, t.sums, ahead);  // E was overwritten
      }
      add_weighed(dims_, keys.k.width, chunk.size(), values, t, t.sums, ahead);
    }
  }

  // Rows of a chunk whose keys have been weighed. With W = 2^(a + m) for the reference m of these
  // weights, keys before the chunk and in it share W: their masses add up as they are, and
  //   o = (W A + tril(W E^T) v) / (W s + row sums of tril(W E^T)).
  // False where the weights of a row cannot be trusted.
  bool rows_fast(const KeyHead& keys, Range chunk, Range next, const Operand& values,
                 const State& prefix, int worker) {
    const CausalTiles& t = layout_.causal[worker];
    const ForwardTiles& tiles = layout_.tiles[worker];
    const std::int64_t count = chunk.size();
    if (!join_start(dims_, keys.k.width, prefix, t)) return false;
    transpose(t.relative, dims_.dp, count, dims_.dp, t.relative_transposed, padded(count));
    for (std::int64_t g = 0; g < dims_.group; ++g) {
      const QueryHead head = query_head(keys, g);
      if (!are_exponents(head.q, head.feature)) return false;
      Ahead ahead(stream_of(head.q, next), stream_of(output_.rows(head), next));
      weigh_rows({head.q, log2_scale(head.alpha)}, chunk.begin, count, t.start_sums.m,
                 t.start_sums.s, tiles.exponents, dims_.dp, t.prefix_sum, tiles.row_factor, ahead);
      lower_product(count, dims_.d, tiles.exponents, dims_.dp, t.relative_transposed, t.products,
                    t.chunk_sum);
      add_scaled(tiles.row_factor, t.chunk_sum, padded(count), 1.0F, true);
      if (!row_sums_are_safe(tiles.row_factor, count) ||
          !all_at_most(t.prefix_sum, count, kLargestRowSum)) {
        return false;
      }
      invert_sums(count, tiles.row_factor);
      output_.weigh_lln(head, chunk, tiles.row_factor);
      Product target = output_.target(head, chunk, tiles);
      target.row_factor = tiles.row_factor;
      gemm(count, output_.width(), dims_.d, by_rows(tiles.exponents, dims_.dp), t.start_sums.a,
           dims_.dvp, target, &ahead);
      target.accumulate = true;
      multiply_lower(count, output_.width(), t.products, values.data, values.ld, target);
      output_.finish(keys, head, chunk, target, tiles);
    }
    return true;
  }

  // Rows of any chunk, with its keys and values loaded in t.keys and t.values.
  void rows_carefully(const KeyHead& keys, Range chunk, const State& prefix, int worker) {
    const CausalTiles& t = layout_.causal[worker];
    load_chunk_keys(dims_, keys, chunk, nullptr, t);
    join(dims_, &prefix, t.sums, t.start);
    for_each_leaf<false>(dims_, {0, chunk.size()}, t.start, t, 0,
                         [&](const Leaf& leaf, const State& before) HWY_ATTR {
                           if (leaf.has_keys) make_relative(dims_, leaf, t);
                           for (std::int64_t g = 0; g < dims_.group; ++g) {
                             leaf_rows(keys, query_head(keys, g), chunk.begin, leaf, before,
                                       worker);
                           }
                         });
  }

  void leaf_rows(const KeyHead& keys, const QueryHead& head, std::int64_t chunk_begin,
                 const Leaf& leaf, const State& before, int worker) {
    const CausalTiles& t = layout_.causal[worker];
    const ForwardTiles& tiles = layout_.tiles[worker];
    const std::int64_t count = leaf.rows.size();
    const Range rows{chunk_begin + leaf.rows.begin, chunk_begin + leaf.rows.end};
    make_weights(dims_, head, rows.begin, leaf, before, nullptr, t);
    // Probabilities before the products, so that no product overflows.
    output_.weigh_lln(head, rows, t.prefix_factor);
    output_.weigh_lln(head, rows, t.chunk_factor);
    for (std::int64_t i = 0; i < count; ++i) {
      scale_row(t.prefix_weights + i * dims_.dp, dims_.dp, t.prefix_factor[i]);
    }
    Product target = output_.target(head, rows, tiles);
    gemm(count, output_.width(), dims_.d, by_rows(t.prefix_weights, dims_.dp), before.values,
         dims_.dvp, target);
    if (leaf.has_keys) {
      const std::int64_t ld = padded(count);
      for (std::int64_t i = 0; i < count; ++i)
        scale_row(t.products + i * ld, ld, t.chunk_factor[i]);
      target.accumulate = true;
      multiply_lower(count, output_.width(), t.products, t.values + leaf.rows.begin * dims_.dvp,
                     dims_.dvp, target);
    }
    output_.finish(keys, head, rows, target, tiles);
  }

  OutputRows output_;
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
