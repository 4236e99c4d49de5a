// Backward pass of everything but causal LLN. A pass over queries gives dq and the sums dC = W^T g
// and t = W^T delta; a pass over keys turns them into dk and dv. Nothing of the size of the
// sequence is kept between them, except two numbers per row where softmax rows span several tiles.
// SPDX-License-Identifier: Apache-2.0
#include "cpu/highway.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/backward.cc"
#include <hwy/foreach_target.h>
// foreach_target first
#include "cpu/backward_parts-inl.h"
#include "cpu/kernel_run-inl.h"
#include "cpu/targets.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {
namespace {

class Backward : KernelRun<BackwardLayout> {
 public:
  // `pairs`: products of bf16 pairs.
  Backward(const Call& call, bool pairs)
      : KernelRun(call), parts_(call, dims_, pairs), pairs_(pairs) {
    parts_.row_lse = layout_.row_lse;
    parts_.row_delta = layout_.row_delta;
  }

  void run() {
    layout_.totals.reset();
    parts_.forget_blocks(layout_.tiles);
    const bool lln = p_.has_lln();
    for (std::int64_t next = 0; next < key_heads();) {
      const Wave wave =
          take_wave(next, key_heads(), lln ? std::ssize(layout_.states) : kUnlimited,
                    lln ? std::ssize(layout_.key_sums) : kUnlimited,
                    lln ? std::ssize(layout_.query_sums) : kUnlimited,
                    [&](std::int64_t pair) { return bidirectional_work(call_, dims_, pair); });
      if (lln) build_states(wave);
      backward_rows(wave);
      if (lln) join_query_sums(wave);
      backward_keys(wave);
      if (lln) collect_parameters(wave);
    }
    layout_.totals.write(call_);
  }

 private:
  void build_states(const Wave& wave) {
    const bool saved = call_.grads.saved.key_lse.given();
    if (!saved) {
      for_key_segments(wave, [&](const HeadWork& work, std::int64_t, std::int64_t i, int worker) {
        const BackwardTiles& tiles = layout_.tiles[worker];
        sum_keys(dims_, key_head(work), work.keys[i], pairs_, tiles.token, tiles.exponents,
                 tiles.values, layout_.key_sums[work.first_key_slot + i]);
      });
    }
    for_heads(wave, [&](const HeadWork& work, std::int64_t h, int) {
      const GradientState& s = layout_.states[h];
      const KeyHead head = key_head(work);
      if (saved) {
        load_state({call_.grads.saved.key_lse, call_.grads.saved.channel_values}, head, dims_,
                   s.state);
      } else {
        join_segments(call_, head, dims_, &layout_.key_sums[work.first_key_slot], work.keys.count(),
                      s.state);
      }
      transpose(s.state.values, dims_.dvp, dims_.dp, dims_.dvp, s.transposed, dims_.dp);
      if (pairs_) join_rows<Pairs>(s.transposed, dims_.dp, dims_.dvp, dims_.dp, s.transposed);
    });
  }

  void backward_rows(const Wave& wave) {
    // The query heads of a group share dC, so one task takes a segment of all of them.
    for_row_segments(wave, [&](const HeadWork& work, std::int64_t h, std::int64_t i, int worker) {
      const std::int64_t slot = work.first_row_slot + i;
      const GradientState* state = nullptr;
      QuerySums sums;
      if (p_.has_lln()) {
        state = &layout_.states[h];
        sums = layout_.query_sums[slot];
        std::fill(sums.t, sums.t + dims_.dp, 0.0F);
        std::fill(sums.dvalues, sums.dvalues + dims_.state(), 0.0F);
      }
      const KeyHead keys = key_head(work);
      for (std::int64_t g = 0; g < dims_.group; ++g) {
        const RowSums* row_sums =
            p_.has_lln() ? &layout_.row_sums[slot * dims_.group + g] : nullptr;
        if (row_sums != nullptr) row_sums->reset(dims_);
        parts_.rows(keys, work.head_k * dims_.group + g, work.rows[i], state, sums, row_sums,
                    layout_.tiles[worker]);
      }
    });
  }

  void join_query_sums(const Wave& wave) {
    for_heads(wave, [&](const HeadWork& work, std::int64_t h, int) {
      const GradientState& s = layout_.states[h];
      std::fill(s.sums.t, s.sums.t + dims_.dp, 0.0F);
      std::fill(s.sums.dvalues, s.sums.dvalues + dims_.state(), 0.0F);
      for (std::int64_t i = 0; i < work.rows.count(); ++i) {
        const QuerySums& part = layout_.query_sums[work.first_row_slot + i];
        add_scaled(s.sums.t, part.t, dims_.dp, 1.0F, true);
        add_scaled(s.sums.dvalues, part.dvalues, dims_.state(), 1.0F, true);
      }
      const KeyHead head = key_head(work);
      add_saved_gradient(call_, head, dims_, s.state, s.sums);
      store_state_gradient(call_, head, dims_, s.state.c, s.sums);
      transpose(s.sums.dvalues, dims_.dvp, dims_.dp, dims_.dvp, s.dtransposed, dims_.dp);
      if (!pairs_) return;
      join_rows<Pairs>(s.dtransposed, dims_.dp, dims_.dvp, dims_.dp, s.dtransposed);
      join_rows<Pairs>(s.sums.dvalues, dims_.dvp, dims_.dp, dims_.dvp, s.sums.dvalues);
    });
  }

  void backward_keys(const Wave& wave) {
    for_heads(wave, [&](const HeadWork& work, std::int64_t, int worker) {
      zero_unused_keys(call_, dims_, key_head(work), layout_.tiles[worker].lln_d);
    });
    for_key_segments(wave, [&](const HeadWork& work, std::int64_t h, std::int64_t i, int worker) {
      const GradientState* state = nullptr;
      double* beta = nullptr;
      if (p_.has_lln()) {
        state = &layout_.states[h];
        beta = layout_.beta_sums + work.first_key_slot + i;
        *beta = 0;
      }
      parts_.keys(key_head(work), work.keys[i], state, beta, layout_.tiles[worker]);
    });
  }

  void collect_parameters(const Wave& wave) {
    for (const HeadWork& work : wave.heads) {
      for (std::int64_t i = 0; i < work.rows.count(); ++i) {
        for (std::int64_t g = 0; g < dims_.group; ++g) {
          layout_.totals.add_rows(work.sequence, work.head_k * dims_.group + g,
                                  layout_.row_sums[(work.first_row_slot + i) * dims_.group + g]);
        }
      }
      for (std::int64_t i = 0; i < work.keys.count(); ++i) {
        layout_.totals.add_beta(work.sequence, work.head_k,
                                layout_.beta_sums[work.first_key_slot + i]);
      }
    }
  }

  BackwardParts parts_;
  bool pairs_;
};

}  // namespace

void backward(const Call& call) { Backward(call, /*pairs=*/false).run(); }
// Gradients of alpha and beta are sums of terms that cancel: products of f32.
void backward_pairs(const Call& call) {
  const bool scales = call.grads.dalpha.given() || call.grads.dbeta.given();
  Backward(call, /*pairs=*/!scales).run();
}

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lln::cpu {

LLN_CPU_EXPORT(backward)
LLN_CPU_EXPORT(backward_pairs)

std::size_t backward_workspace(const Problem& problem, int workers) {
  return layout_bytes<BackwardLayout>(problem, workers);
}

}  // namespace lln::cpu
#endif
