// Forward of the reference: every row is the weighted mean of the values that it sees, with weights
// from scores.h. The state that LLN saves is computed from its own definition (state.h) beside it.
// SPDX-License-Identifier: Apache-2.0
#include "reference/reference.h"
#include "reference/state.h"

namespace lln::reference {
namespace {

// All query heads that share one key head of one sequence.
void forward_group(const Call& call, std::int64_t s, std::int64_t head_k) {
  const Problem& p = call.problem;
  const Sequence& seq = call.sequences[static_cast<std::size_t>(s)];
  const auto all = [](std::int64_t) { return true; };
  const Keys keys = load_keys(call, s, head_k);
  if (call.out.saved.key_lse.given()) {
    const KeyState state = state_of(keys);
    store_rows(call.out.saved.key_lse, s, head_k, 0, state.lse);
    store_rows(call.out.saved.channel_values, s, head_k, 0, state.values);
  }

  const std::int64_t group = p.heads / p.heads_k;
  for (std::int64_t h = head_k * group; h < (head_k + 1) * group; ++h) {
    const Rows q = load_rows(call.in.q, seq.batch, h, seq.q_begin, seq.q_tokens, all);
    Rows lln_part(q.count, keys.v.width);
    Rows dot_part(q.count, keys.v.width);
    if (p.has_lln()) {
      const Exponents a(q, element(call.in.alpha, s, h, 0, 0), p.feature, p.power);
      lln_part = weighted_values(LlnScores(a, keys.u), Visible(seq, p.causal, 0, keys.of_state),
                                 q.count, keys.v);
    }
    if (p.kind != Kind::lln) {
      const Visible visible(seq, p.causal, p.diag_block);
      dot_part = weighted_values(DotScores(q, keys.k), visible, q.count, keys.v);
    }
    Rows o(q.count, keys.v.width);
    for (std::int64_t i = 0; i < q.count; ++i) {
      for (std::int64_t c = 0; c < keys.v.width; ++c) {
        const PartWeights w = part_weights(call, seq.batch, h, seq.q_begin + i, c);
        o[i][c] = w.lln * lln_part[i][c] + w.diag * dot_part[i][c];
      }
    }
    store_rows(call.out.o, seq.batch, h, seq.q_begin, o);
  }
}

}  // namespace

void run_forward(const Call& call) {
  const std::int64_t heads_k = call.problem.heads_k;
  parallel_for(call.parallel, call.problem.sequences * heads_k, [&](std::int64_t task, int) {
    forward_group(call, task / heads_k, task % heads_k);
  });
}

}  // namespace lln::reference
