// Backward of the reference, the chain rule on the quadratic form: with P the weights of a row,
// G_ij = g_i . v_j and delta_i = sum_j P_ij G_ij,
//   dv_j = sum_i P_ij g_i      d score_ij = P_ij (G_ij - delta_i)
// and from there through the score to q and k. What belongs to several (sequence, head) pairs at
// once, such as a mix per call, is summed afterwards in a fixed order. The state of all keys is a
// second output: its gradient goes to the keys beside that of the rows.
// SPDX-License-Identifier: Apache-2.0
#include "reference/reference.h"
#include "reference/state.h"

namespace lln::reference {
namespace {

// Adds the gradients of one part, given the gradient g of its output; returns the output itself.
template <class Scores>
Rows backward_part(const Scores& scores, const Visible& visible, const Rows& g, const Rows& v,
                   Rows& dquery, Rows& dkey, Rows& dv) {
  Rows o(g.count, g.width);
  WeightedRow row;
  std::vector<double> products;  // G_ij
  for (std::int64_t i = 0; i < g.count; ++i) {
    row.fill(scores, visible, i);
    products.assign(row.keys.size(), 0.0);
    double delta = 0;
    for (std::size_t x = 0; x < row.keys.size(); ++x) {
      const std::int64_t j = row.keys[x];
      for (std::int64_t c = 0; c < g.width; ++c) {
        products[x] += g[i][c] * v[j][c];
        o[i][c] += row.weights[x] * v[j][c];
        dv[j][c] += row.weights[x] * g[i][c];
      }
      delta += row.weights[x] * products[x];
    }
    for (std::size_t x = 0; x < row.keys.size(); ++x) {
      const double ds = row.weights[x] * (products[x] - delta);
      scores.add_gradient(i, row.keys[x], row.scores[x], ds, dquery, dkey);
    }
  }
  return o;
}

// dx += scale f'(scale x) df, and the return value is d scale = sum f'(scale x) x df.
double through_feature(const Rows& x, double scale, const Rows& derivative, const Rows& df,
                       Rows& dx) {
  double dscale = 0;
  for (std::size_t i = 0; i < x.data.size(); ++i) {
    dx.data[i] += scale * derivative.data[i] * df.data[i];
    dscale += derivative.data[i] * df.data[i] * x.data[i];
  }
  return dscale;
}

// What one (sequence, query head) adds to the gradients that may be shared.
struct SharedTerms {
  double dalpha = 0;
  double dbeta = 0;
  Rows dlln_weight;   // g * LLN part, [tokens, dim_v]
  Rows ddiag_weight;  // g * Diag part
};

Rows product(const Rows& x, const Rows& y) {
  Rows result(x.count, x.width);
  for (std::size_t i = 0; i < x.data.size(); ++i) result.data[i] = x.data[i] * y.data[i];
  return result;
}

struct Group {
  explicit Group(Keys all)
      : keys(std::move(all)),
        dk(keys.k.count, keys.k.width),
        dv(keys.v.count, keys.v.width),
        dlse(1, keys.k.width) {}

  // Takes the gradients of exponents to k and the given state; returns that of beta.
  double add(const Rows& du) {
    for (const std::int64_t j : keys.of_state) {
      const std::int64_t l = j - keys.k.count;
      dlse[0][l] += du[j][l];
    }
    return through_feature(keys.k, keys.beta, keys.u.derivative, du, dk);
  }

  Keys keys;  // of the key head
  Rows dk;    // summed over the query heads, as all here
  Rows dv;    // [keys, dim_v], those of the given state included
  Rows dlse;  // [1, dim] of the given state
};

// The keys' part in the state of all: with w_jl = exp(u_jl - c_l), dv_j = sum_l w_jl dC_l and
// du_jl = w_jl (v_j . dC_l - C_l . dC_l + dc_l). Returns the gradient of beta.
double backward_saved(const Call& call, std::int64_t s, std::int64_t head_k, Group& group) {
  const Keys& keys = group.keys;
  const KeyState state = state_of(keys);
  const auto counts = [&](std::int64_t l) { return state.lse[0][l] != kMinusInfinity; };
  const auto all = [](std::int64_t) { return true; };
  const std::int64_t dim = keys.k.width;
  const Rows dlse = load_rows(call.grads.dsaved.key_lse, s, head_k, 0, 1, all);
  const Rows dvalues = load_rows(call.grads.dsaved.channel_values, s, head_k, 0, dim, counts);
  Rows du(keys.v.count, dim);
  for (std::int64_t l = 0; l < dim; ++l) {
    if (!counts(l)) continue;
    for (const std::int64_t j : keys.counted) {
      const double weight = std::exp(keys.u.value[j][l] - state.lse[0][l]);
      double product = dlse[0][l];
      for (std::int64_t c = 0; c < keys.v.width; ++c) {
        product += (keys.v[j][c] - state.values[l][c]) * dvalues[l][c];
        group.dv[j][c] += weight * dvalues[l][c];
      }
      du[j][l] = weight * product;
    }
  }
  return group.add(du);
}

SharedTerms backward_head(const Call& call, std::int64_t s, std::int64_t h, Group& group) {
  const Problem& p = call.problem;
  const Sequence& seq = call.sequences[static_cast<std::size_t>(s)];
  const Keys& keys = group.keys;
  const auto all = [](std::int64_t) { return true; };
  const Rows q = load_rows(call.in.q, seq.batch, h, seq.q_begin, seq.q_tokens, all);
  const Rows g = load_rows(call.grads.g, seq.batch, h, seq.q_begin, seq.q_tokens, all);
  Rows lln_g(g.count, g.width);
  Rows dot_g(g.count, g.width);
  for (std::int64_t i = 0; i < g.count; ++i) {
    for (std::int64_t c = 0; c < g.width; ++c) {
      const PartWeights w = part_weights(call, seq.batch, h, seq.q_begin + i, c);
      lln_g[i][c] = w.lln * g[i][c];
      dot_g[i][c] = w.diag * g[i][c];
    }
  }

  SharedTerms terms;
  Rows dq(q.count, q.width);
  if (p.has_lln()) {
    const double alpha = element(call.in.alpha, s, h, 0, 0);
    const Exponents a(q, alpha, p.feature, p.power);
    Rows da(q.count, q.width);
    Rows du(keys.v.count, keys.k.width);
    const Rows o = backward_part(LlnScores(a, keys.u), Visible(seq, p.causal, 0, keys.of_state),
                                 lln_g, keys.v, da, du, group.dv);
    terms.dalpha = through_feature(q, alpha, a.derivative, da, dq);
    terms.dbeta = group.add(du);
    terms.dlln_weight = product(g, o);
  }
  if (p.kind != Kind::lln) {
    const Rows o = backward_part(DotScores(q, keys.k), Visible(seq, p.causal, p.diag_block), dot_g,
                                 keys.v, dq, group.dk, group.dv);
    terms.ddiag_weight = product(g, o);
  }
  store_rows(call.grads.dq, seq.batch, h, seq.q_begin, dq);
  return terms;
}

void backward_group(const Call& call, std::int64_t s, std::int64_t head_k,
                    std::vector<SharedTerms>& terms) {
  const Problem& p = call.problem;
  const Sequence& seq = call.sequences[static_cast<std::size_t>(s)];
  Group group(load_keys(call, s, head_k));
  const std::int64_t per_key_head = p.heads / p.heads_k;
  const std::int64_t first = head_k * per_key_head;
  for (std::int64_t h = first; h < first + per_key_head; ++h) {
    terms[static_cast<std::size_t>(s * p.heads + h)] = backward_head(call, s, h, group);
  }
  if (call.grads.dsaved.given()) {
    terms[static_cast<std::size_t>(s * p.heads + first)].dbeta +=
        backward_saved(call, s, head_k, group);
  }
  store_rows(call.grads.dk, seq.batch, head_k, seq.k_begin, group.dk);
  store_rows(call.grads.dv, seq.batch, head_k, seq.k_begin, group.dv, 0, seq.k_tokens);
  if (!call.grads.dstate.key_lse.given()) return;
  store_rows(call.grads.dstate.key_lse, s, head_k, 0, group.dlse);
  store_rows(call.grads.dstate.channel_values, s, head_k, 0, group.dv, seq.k_tokens, p.dim);
}

// A gradient whose dimensions of size 1 are sums over that dimension.
class SharedGradient {
 public:
  explicit SharedGradient(const View& view)
      : view_(view), sums_(view.shape[0] * view.shape[1] * view.shape[2], view.shape[3]) {}

  void add(std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t c, double value) {
    const auto at = [&](int i, std::int64_t index) { return view_.shape[i] == 1 ? 0 : index; };
    sums_[(at(0, b) * view_.shape[1] + at(1, h)) * view_.shape[2] + at(2, n)][at(3, c)] += value;
  }

  void store_sums() const {
    for (std::int64_t row = 0; row < sums_.count; ++row) {
      const std::int64_t n = row % view_.shape[2];
      const std::int64_t h = row / view_.shape[2] % view_.shape[1];
      const std::int64_t b = row / view_.shape[2] / view_.shape[1];
      for (std::int64_t c = 0; c < sums_.width; ++c) {
        store(view_, offset(view_.stride, b, h, n, c), sums_[row][c]);
      }
    }
  }

 private:
  View view_;
  Rows sums_;  // [view without its last dimension, last dimension]
};

// Sums term(terms of a sequence and head, row, channel) into the gradient of a weight.
template <class Term>
void store_weight_gradient(const Call& call, const View& view,
                           const std::vector<SharedTerms>& terms, Term term) {
  if (!view.given()) return;
  const Problem& p = call.problem;
  SharedGradient gradient(view);
  for (std::int64_t s = 0; s < p.sequences; ++s) {
    const Sequence& seq = call.sequences[static_cast<std::size_t>(s)];
    for (std::int64_t h = 0; h < p.heads; ++h) {
      const SharedTerms& own = terms[static_cast<std::size_t>(s * p.heads + h)];
      for (std::int64_t i = 0; i < seq.q_tokens; ++i) {
        for (std::int64_t c = 0; c < p.dim_v; ++c) {
          gradient.add(seq.batch, h, seq.q_begin + i, c, term(own, i, c));
        }
      }
    }
  }
  gradient.store_sums();
}

void store_parameter_gradient(const Call& call, const View& view, std::int64_t query_heads_per_head,
                              const std::vector<SharedTerms>& terms, double SharedTerms::*term) {
  if (!view.given()) return;
  const Problem& p = call.problem;
  SharedGradient gradient(view);
  for (std::int64_t s = 0; s < p.sequences; ++s) {
    for (std::int64_t h = 0; h < p.heads; ++h) {
      const SharedTerms& own = terms[static_cast<std::size_t>(s * p.heads + h)];
      gradient.add(s, h / query_heads_per_head, 0, 0, own.*term);
    }
  }
  gradient.store_sums();
}

}  // namespace

void run_backward(const Call& call) {
  const Problem& p = call.problem;
  std::vector<SharedTerms> terms(static_cast<std::size_t>(p.sequences * p.heads));
  parallel_for(call.parallel, p.sequences * p.heads_k, [&](std::int64_t task, int) {
    backward_group(call, task / p.heads_k, task % p.heads_k, terms);
  });

  const AttentionGradients& grads = call.grads;
  store_parameter_gradient(call, grads.dalpha, 1, terms, &SharedTerms::dalpha);
  store_parameter_gradient(call, grads.dbeta, p.heads / p.heads_k, terms, &SharedTerms::dbeta);
  const auto lln = [](const SharedTerms& t, std::int64_t i, std::int64_t c) {
    return t.dlln_weight[i][c];
  };
  const auto diag = [](const SharedTerms& t, std::int64_t i, std::int64_t c) {
    return t.ddiag_weight[i][c];
  };
  store_weight_gradient(call, grads.dlln_weight, terms, lln);
  store_weight_gradient(call, grads.ddiag_weight, terms, diag);
  store_weight_gradient(call, grads.dmix, terms,
                        [&](const SharedTerms& t, std::int64_t i, std::int64_t c) {
                          return lln(t, i, c) - diag(t, i, c);
                        });
}

}  // namespace lln::reference
