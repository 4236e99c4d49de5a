// Forward of the reference: every row is the weighted mean of the values that it sees, with weights
// from scores.h. The state that LLN saves is computed from its own definition beside it.
// SPDX-License-Identifier: Apache-2.0
#include "reference/reference.h"
#include "reference/scores.h"

namespace lln::reference {
namespace {

// c_l = logsumexp_j f(beta k_jl) and C_l = sum_j exp(f(beta k_jl) - c_l) v_j over all valid keys.
void save_state(const Call& call, std::int64_t s, std::int64_t head_k, const Exponents& u,
                const Rows& v) {
  const Sequence& sequence = call.sequences[static_cast<std::size_t>(s)];
  Rows lse(1, u.value.width);
  Rows values(u.value.width, v.width);
  for (std::int64_t l = 0; l < u.value.width; ++l) {
    double largest = kMinusInfinity;
    for (std::int64_t j = sequence.key_first; j < sequence.key_end; ++j) {
      if (sequence.valid(j)) largest = std::max(largest, u.value[j][l]);
    }
    double sum = 0;
    for (std::int64_t j = sequence.key_first; j < sequence.key_end; ++j) {
      if (!sequence.valid(j)) continue;
      const double weight = std::exp(u.value[j][l] - largest);
      sum += weight;
      for (std::int64_t c = 0; c < v.width; ++c) values[l][c] += weight * v[j][c];
    }
    lse[0][l] = largest + std::log(sum);
    if (sequence.key_first == sequence.key_end) {  // the empty set: c = -inf, C = 0
      lse[0][l] = kMinusInfinity;
      continue;
    }
    for (std::int64_t c = 0; c < v.width; ++c) values[l][c] /= sum;
  }
  store_rows(call.out.saved.key_lse, s, head_k, 0, lse);
  store_rows(call.out.saved.channel_values, s, head_k, 0, values);
}

// All query heads that share one key head of one sequence.
void forward_group(const Call& call, std::int64_t s, std::int64_t head_k) {
  const Problem& p = call.problem;
  const Sequence& seq = call.sequences[static_cast<std::size_t>(s)];
  const auto valid = [&](std::int64_t key) { return seq.valid(key); };
  const auto all = [](std::int64_t) { return true; };
  const Rows k = load_rows(call.in.k, seq.batch, head_k, seq.k_begin, seq.k_tokens, valid);
  const Rows v = load_rows(call.in.v, seq.batch, head_k, seq.k_begin, seq.k_tokens, valid);
  const double beta = p.has_lln() ? element(call.in.beta, s, head_k, 0, 0) : 0;
  const Exponents u(k, beta, p.feature, p.power);
  if (call.out.saved.key_lse.given()) save_state(call, s, head_k, u, v);

  const std::int64_t group = p.heads / p.heads_k;
  for (std::int64_t h = head_k * group; h < (head_k + 1) * group; ++h) {
    const Rows q = load_rows(call.in.q, seq.batch, h, seq.q_begin, seq.q_tokens, all);
    Rows lln_part(q.count, v.width);
    Rows dot_part(q.count, v.width);
    if (p.has_lln()) {
      const Exponents a(q, element(call.in.alpha, s, h, 0, 0), p.feature, p.power);
      lln_part = weighted_values(LlnScores(a, u), Visible(seq, p.causal, 0), q.count, v);
    }
    if (p.kind != Kind::lln) {
      const Visible visible(seq, p.causal, p.diag_block);
      dot_part = weighted_values(DotScores(q, k), visible, q.count, v);
    }
    Rows o(q.count, v.width);
    for (std::int64_t i = 0; i < q.count; ++i) {
      for (std::int64_t c = 0; c < v.width; ++c) {
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
