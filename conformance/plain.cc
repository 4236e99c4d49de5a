// The plain evaluation of a whole case: parts of plain_parts.h, mixed, and summed over what is
// shared between heads and sequences.
// SPDX-License-Identifier: Apache-2.0
#include "conformance/plain.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "conformance/plain_parts.h"
#include "math/feature_map.h"

namespace lln::conformance {
namespace {

template <class Body>
void for_each_task(Parallel* parallel, std::int64_t tasks, Body& body) {
  if (parallel == nullptr) {
    for (std::int64_t task = 0; task < tasks; ++task) body(task);
    return;
  }
  parallel->run(
      tasks, [](void* context, std::int64_t task, int) { (*static_cast<Body*>(context))(task); },
      &body);
}

// Element of a parameter tensor whose dimensions of size 1 stand for every index.
double broadcast(const Tensor& t, std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t c) {
  const Shape& s = t.shape();
  return t.get(s[0] == 1 ? 0 : b, s[1] == 1 ? 0 : h, s[2] == 1 ? 0 : n, s[3] == 1 ? 0 : c);
}

Matrix rows_of(const Tensor& t, std::int64_t b, std::int64_t h, std::int64_t begin,
               std::int64_t count, const std::uint8_t* valid) {
  Matrix m(count, t.shape()[3]);
  for (std::int64_t n = 0; n < count; ++n) {
    if (valid != nullptr && valid[n] == 0) continue;
    for (std::int64_t c = 0; c < m.columns; ++c) {
      m[n][c] = static_cast<float>(t.get(b, h, begin + n, c));
    }
  }
  return m;
}

// f(scale x) rounded, and scale f'(scale x).
struct Exponents {
  Matrix value;
  Matrix slope;
};

Exponents exponents(const Problem& p, const Matrix& x, double scale) {
  Exponents result{Matrix(x.rows, x.columns), Matrix(x.rows, x.columns)};
  for (std::size_t i = 0; i < x.data.size(); ++i) {
    const float product = round_significand(p.dtype, static_cast<float>(scale) * x.data[i]);
    const LogFeature<float> f = log_feature(p.feature, p.power, clamp_exponent(product));
    result.value.data[i] = round_significand(p.dtype, clamp_exponent(f.value));
    result.slope.data[i] = round_significand(p.dtype, f.derivative);
  }
  return result;
}

std::pair<double, double> weights_at(const Case& c, const Inputs& in, std::int64_t b,
                                     std::int64_t h, std::int64_t n, std::int64_t ch) {
  if (c.problem.kind != Kind::lln_diag) return {1, 1};
  if (in.lln_weight.given()) {
    return {broadcast(in.lln_weight, b, h, n, ch), broadcast(in.diag_weight, b, h, n, ch)};
  }
  const double mix = in.mix.given() ? broadcast(in.mix, b, h, n, ch) : double{options(c).mix};
  return {mix, 1 - mix};
}

// What one (sequence, query head) contributes.
struct HeadResult {
  PartResult lln, dot;
  Matrix q, k, g;
  Exponents a, u;
};

// The given state as keys behind those of k, one for each channel that holds any: its exponent is c
// in that channel and -inf in the others. c is rounded as the exponents of keys are: the c of all
// keys is, and the weight of a state is an exponential of their difference. Returns which keys they
// are.
std::vector<std::int64_t> add_state_keys(DType dtype, const Inputs& in, std::int64_t s,
                                         std::int64_t head_k, Matrix& u, Matrix& v) {
  std::vector<std::int64_t> keys;
  if (!in.state_lse.given()) return keys;
  const std::int64_t first = u.rows;
  const auto extend = [](Matrix& m, std::int64_t rows, float value) {
    m.rows += rows;
    m.data.resize(static_cast<std::size_t>(m.rows * m.columns), value);
  };
  extend(u, u.columns, -std::numeric_limits<float>::infinity());
  extend(v, u.columns, 0);
  for (std::int64_t l = 0; l < u.columns; ++l) {
    const double lse = in.state_lse.get(s, head_k, 0, l);
    if (std::isinf(lse)) continue;
    keys.push_back(first + l);
    u[first + l][l] = round_significand(dtype, static_cast<float>(lse));
    for (std::int64_t c = 0; c < v.columns; ++c) {
      v[first + l][c] = static_cast<float>(in.state_values.get(s, head_k, l, c));
    }
  }
  return keys;
}

// The state after the last key: a part with all keys and no rows. In the backward its gradient goes
// to the keys, once for all query heads of a group.
PartResult evaluate_state(Part part, const SequenceRows& seq, std::vector<std::int64_t> keys,
                          bool backward) {
  part.a = Matrix(0, part.u.columns);
  for (std::int64_t j = 0; j < seq.k_tokens; ++j) {
    if (seq.valid[static_cast<std::size_t>(j)] != 0) keys.push_back(j);
  }
  part.visible = [&keys](std::int64_t, std::vector<std::int64_t>& out) { out = keys; };
  return evaluate_factorised(part, backward);
}

void add(const Sized& from, Sized& to) {
  for (std::size_t i = 0; i < from.value.data.size(); ++i) {
    to.value.data[i] += from.value.data[i];
    to.size.data[i] += from.size.data[i];
  }
}

HeadResult evaluate_head(const Case& c, const Inputs& in, std::int64_t s, std::int64_t h) {
  const Problem& p = c.problem;
  const SequenceRows& seq = in.sequences[static_cast<std::size_t>(s)];
  const std::int64_t head_k = h / (p.heads / p.heads_k);
  const bool backward = p.op == Op::backward;
  HeadResult head;
  head.q = rows_of(in.q, seq.batch, h, seq.q_begin, seq.q_tokens, nullptr);
  head.g = rows_of(in.g, seq.batch, h, seq.q_begin, seq.q_tokens, nullptr);
  head.k = rows_of(in.k, seq.batch, head_k, seq.k_begin, seq.k_tokens, seq.valid.data());
  Matrix v = rows_of(in.v, seq.batch, head_k, seq.k_begin, seq.k_tokens, seq.valid.data());
  const auto weighted = [&](bool lln) {
    Matrix g = head.g;
    for (std::int64_t i = 0; i < g.rows; ++i) {
      for (std::int64_t ch = 0; ch < g.columns; ++ch) {
        const auto w = weights_at(c, in, seq.batch, h, seq.q_begin + i, ch);
        const auto own = static_cast<float>(lln ? w.first : w.second);
        g[i][ch] = round_significand(p.dtype, own * g[i][ch]);
      }
    }
    return g;
  };
  const auto visible = [&p, &seq](std::int64_t block, std::vector<std::int64_t> everywhere = {}) {
    return [&p, &seq, block, everywhere](std::int64_t row, std::vector<std::int64_t>& keys) {
      keys = everywhere;
      for (std::int64_t j = seq.first_valid; j < seq.k_tokens; ++j) {
        if (seq.valid[static_cast<std::size_t>(j)] == 0 || (p.causal && j > row)) continue;
        const std::int64_t after = row - seq.block_origin, key_after = j - seq.block_origin;
        if (block > 0 && (after < 0 || key_after < 0 || after / block != key_after / block)) {
          continue;
        }
        keys.push_back(j);
      }
    };
  };
  if (p.has_lln()) {
    head.a = exponents(p, head.q, broadcast(in.alpha, s, h, 0, 0));
    head.u = exponents(p, head.k, broadcast(in.beta, s, head_k, 0, 0));
    Matrix u = head.u.value;
    const std::vector<std::int64_t> of_state = add_state_keys(p.dtype, in, s, head_k, u, v);
    Part part{p.dtype, true, head.a.value, u, v, weighted(true), visible(0, of_state)};
    head.lln = p.causal ? evaluate_rows(part, backward) : evaluate_factorised(part, backward);
    if (backward && p.state && h % (p.heads / p.heads_k) == 0) {
      part.dlse = rows_of(in.dsaved_lse, s, head_k, 0, 1, nullptr);
      part.dvalues = rows_of(in.dsaved_values, s, head_k, 0, p.dim, nullptr);
      const PartResult state = evaluate_state(part, seq, of_state, true);
      add(state.du, head.lln.du);
      add(state.dv, head.lln.dv);
    } else if (p.causal && c.saved && !backward) {
      PartResult state = evaluate_state(part, seq, of_state, false);
      head.lln.lse = std::move(state.lse);
      head.lln.channel_values = std::move(state.channel_values);
    }
  }
  if (p.kind != Kind::lln) {
    head.dot = evaluate_rows(
        {p.dtype, false, head.q, head.k, v, weighted(false), visible(p.diag_block)}, backward);
  }
  return head;
}

// Adds to the element of a tensor that stands for this index: dimensions of size 1 are sums.
void add(Tensor& t, std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t c, double x) {
  const Shape& s = t.shape();
  const std::int64_t i[] = {s[0] == 1 ? 0 : b, s[1] == 1 ? 0 : h, s[2] == 1 ? 0 : n,
                            s[3] == 1 ? 0 : c};
  t.set(i[0], i[1], i[2], i[3], t.get(i[0], i[1], i[2], i[3]) + x);
}

class Collector {
 public:
  Collector(const Case& c, const Inputs& in, Plain& plain) : c_(c), in_(in), plain_(plain) {
    for (TensorSet* set : {&plain.values, &plain.sizes}) {
      *set = make_outputs(c, in, DType::f64);
      for (const TensorSet::Entry& entry : set->entries()) {
        Tensor& tensor = set->at(entry.name);
        tensor.for_each([&](std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t ch) {
          tensor.set(b, h, n, ch, 0);
        });
      }
    }
  }

  void collect(const HeadResult& head, std::int64_t s, std::int64_t h) {
    plain_.exponent = std::max({plain_.exponent, head.lln.exponent, head.dot.exponent});
    if (c_.problem.op == Op::forward) {
      collect_forward(head, s, h);
    } else {
      collect_queries(head, s, h);
      collect_keys(head, s, h);
    }
  }

  // Sums over heads and sequences are done: what is stored in the dtype is rounded to it.
  void finish() {
    for (const char* name : {"o", "dq", "dk", "dv"}) {
      if (!plain_.values.has(name)) continue;
      Tensor& t = plain_.values.at(name);
      t.for_each([&](std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t ch) {
        const auto x = static_cast<float>(t.get(b, h, n, ch));
        t.set(b, h, n, ch, round_significand(c_.problem.dtype, x));
      });
    }
  }

 private:
  void put(const char* name, std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t ch,
           double value, double size) {
    if (!plain_.values.has(name)) return;
    add(plain_.values.at(name), b, h, n, ch, value);
    add(plain_.sizes.at(name), b, h, n, ch, std::abs(size));
  }

  static std::pair<double, double> at(const Sized& m, std::int64_t i, std::int64_t c) {
    return m.value.data.empty() ? std::pair{0.0, 0.0}
                                : std::pair{double{m.value[i][c]}, double{m.size[i][c]}};
  }

  void collect_forward(const HeadResult& head, std::int64_t s, std::int64_t h) {
    const Problem& p = c_.problem;
    const SequenceRows& seq = in_.sequences[static_cast<std::size_t>(s)];
    for (std::int64_t i = 0; i < seq.q_tokens; ++i) {
      for (std::int64_t ch = 0; ch < p.dim_v; ++ch) {
        const auto w = weights_at(c_, in_, seq.batch, h, seq.q_begin + i, ch);
        const auto lln = at(head.lln.o, i, ch);
        const auto dot = at(head.dot.o, i, ch);
        put("o", seq.batch, h, seq.q_begin + i, ch, w.first * lln.first + w.second * dot.first,
            std::abs(w.first) * lln.second + std::abs(w.second) * dot.second);
      }
    }
    const std::int64_t group = p.heads / p.heads_k;
    if (!plain_.values.has("key_lse") || h % group != 0) return;
    for (std::int64_t l = 0; l < p.dim; ++l) {
      const auto lse = at(head.lln.lse, 0, l);
      put("key_lse", s, h / group, 0, l, lse.first, lse.second);
      for (std::int64_t ch = 0; ch < p.dim_v; ++ch) {
        const auto values = at(head.lln.channel_values, l, ch);
        put("channel_values", s, h / group, l, ch, values.first, values.second);
      }
    }
  }

  void collect_queries(const HeadResult& head, std::int64_t s, std::int64_t h) {
    const Problem& p = c_.problem;
    const SequenceRows& seq = in_.sequences[static_cast<std::size_t>(s)];
    const double alpha = p.has_lln() ? broadcast(in_.alpha, s, h, 0, 0) : 0;
    for (std::int64_t i = 0; i < seq.q_tokens; ++i) {
      const std::int64_t n = seq.q_begin + i;
      for (std::int64_t l = 0; l < p.dim; ++l) {
        const auto dot = at(head.dot.da, i, l);
        const auto lln = at(head.lln.da, i, l);
        const double slope = p.has_lln() ? head.a.slope[i][l] : 0;
        const double x = head.q[i][l];
        put("dq", seq.batch, h, n, l, alpha * slope * lln.first + dot.first,
            std::abs(alpha * slope) * lln.second + dot.second);
        put("dalpha", s, h, 0, 0, slope * x * lln.first, slope * x * lln.second);
      }
      for (std::int64_t ch = 0; ch < p.dim_v; ++ch) {
        const double g = head.g[i][ch];
        const auto lln = at(head.lln.o, i, ch);
        const auto dot = at(head.dot.o, i, ch);
        put("dlln_weight", seq.batch, h, n, ch, g * lln.first, g * lln.second);
        put("ddiag_weight", seq.batch, h, n, ch, g * dot.first, g * dot.second);
        put("dmix", seq.batch, h, n, ch, g * (lln.first - dot.first),
            g * (lln.second + dot.second));
      }
    }
  }

  void collect_keys(const HeadResult& head, std::int64_t s, std::int64_t h) {
    const Problem& p = c_.problem;
    const SequenceRows& seq = in_.sequences[static_cast<std::size_t>(s)];
    const std::int64_t head_k = h / (p.heads / p.heads_k);
    const double beta = p.has_lln() ? broadcast(in_.beta, s, head_k, 0, 0) : 0;
    for (std::int64_t j = 0; j < seq.k_tokens; ++j) {
      const std::int64_t n = seq.k_begin + j;
      for (std::int64_t l = 0; l < p.dim; ++l) {
        const auto dot = at(head.dot.du, j, l);
        const auto lln = at(head.lln.du, j, l);
        const double slope = p.has_lln() ? head.u.slope[j][l] : 0;
        const double x = head.k[j][l];
        put("dk", seq.batch, head_k, n, l, beta * slope * lln.first + dot.first,
            std::abs(beta * slope) * lln.second + dot.second);
        put("dbeta", s, head_k, 0, 0, slope * x * lln.first, slope * x * lln.second);
      }
      for (std::int64_t ch = 0; ch < p.dim_v; ++ch) {
        const auto lln = at(head.lln.dv, j, ch);
        const auto dot = at(head.dot.dv, j, ch);
        put("dv", seq.batch, head_k, n, ch, lln.first + dot.first, lln.second + dot.second);
      }
    }
    for (std::int64_t l = 0; p.state && l < p.dim; ++l) {  // keys of the given state
      const auto lse = at(head.lln.du, seq.k_tokens + l, l);
      put("dstate_lse", s, head_k, 0, l, lse.first, lse.second);
      for (std::int64_t ch = 0; ch < p.dim_v; ++ch) {
        const auto values = at(head.lln.dv, seq.k_tokens + l, ch);
        put("dstate_values", s, head_k, l, ch, values.first, values.second);
      }
    }
  }

  const Case& c_;
  const Inputs& in_;
  Plain& plain_;
};

}  // namespace

Plain evaluate_plain(const Case& c, const Inputs& in, Parallel* parallel) {
  const std::int64_t heads = c.problem.heads;
  std::vector<HeadResult> results(static_cast<std::size_t>(c.problem.sequences * heads));
  auto evaluate = [&](std::int64_t task) {
    results[static_cast<std::size_t>(task)] = evaluate_head(c, in, task / heads, task % heads);
  };
  for_each_task(parallel, c.problem.sequences * heads, evaluate);
  Plain plain;
  Collector collector(c, in, plain);
  for (std::int64_t s = 0; s < c.problem.sequences; ++s) {
    for (std::int64_t h = 0; h < heads; ++h) {
      collector.collect(results[static_cast<std::size_t>(s * heads + h)], s, h);
    }
  }
  collector.finish();
  return plain;
}

}  // namespace lln::conformance
