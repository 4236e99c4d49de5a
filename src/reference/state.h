// Keys that are given as their state. Channel l of a state says as much as one key whose exponent
// is c_l in channel l and -inf in the others, and whose value is C_l: such keys stand behind those
// of k, every row sees them, and all else is the quadratic form of any other key.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <vector>

#include "reference/scores.h"

namespace lln::reference {

// The keys of one key head of one sequence: those of k, then one for each channel of the state.
struct Keys {
  Rows k;       // of k alone
  Exponents u;  // [keys, dim]
  Rows v;       // [keys, dim_v]
  double beta = 0;
  std::vector<std::int64_t> of_state;  // those of the state that are not empty
  std::vector<std::int64_t> counted;   // all valid ones, of k and of the state

  std::int64_t state_key(std::int64_t channel) const { return k.count + channel; }
};

inline Keys load_keys(const Call& call, std::int64_t s, std::int64_t head_k) {
  const Problem& p = call.problem;
  const Sequence& seq = call.sequences[static_cast<std::size_t>(s)];
  const auto valid = [&](std::int64_t key) { return seq.valid(key); };
  const auto all = [](std::int64_t) { return true; };
  Rows k = load_rows(call.in.k, seq.batch, head_k, seq.k_begin, seq.k_tokens, valid);
  Rows v = load_rows(call.in.v, seq.batch, head_k, seq.k_begin, seq.k_tokens, valid);
  const double beta = p.has_lln() ? element(call.in.beta, s, head_k, 0, 0) : 0;
  Exponents u(k, beta, p.feature, p.power);
  Keys keys{std::move(k), std::move(u), std::move(v), beta, {}, {}};
  for (std::int64_t j = 0; j < seq.k_tokens; ++j) {
    if (seq.valid(j)) keys.counted.push_back(j);
  }
  if (!call.in.state.given()) return keys;
  const Rows lse = load_rows(call.in.state.key_lse, s, head_k, 0, 1, all);
  const Rows values = load_rows(call.in.state.channel_values, s, head_k, 0, p.dim,
                                [&](std::int64_t l) { return lse[0][l] != kMinusInfinity; });
  keys.u.value.append(Rows(p.dim, p.dim, kMinusInfinity));
  keys.u.derivative.append(Rows(p.dim, p.dim));
  keys.v.append(values);
  for (std::int64_t l = 0; l < p.dim; ++l) {
    if (lse[0][l] == kMinusInfinity) continue;
    keys.u.value[keys.state_key(l)][l] = clamp_exponent(lse[0][l]);
    keys.of_state.push_back(keys.state_key(l));
    keys.counted.push_back(keys.state_key(l));
  }
  return keys;
}

// The state of all keys: c_l = logsumexp_j u_jl and C_l = sum_j exp(u_jl - c_l) v_j.
struct KeyState {
  Rows lse;     // [1, dim]; -inf: no keys
  Rows values;  // [dim, dim_v]
};

inline KeyState state_of(const Keys& keys) {
  const std::int64_t dim = keys.u.value.width;
  KeyState state{Rows(1, dim, kMinusInfinity), Rows(dim, keys.v.width)};
  for (std::int64_t l = 0; l < dim; ++l) {
    double largest = kMinusInfinity;
    bool empty = true;  // not where a key is NaN, which no maximum shows
    for (const std::int64_t j : keys.counted) {
      largest = std::max(largest, keys.u.value[j][l]);
      empty = empty && keys.u.value[j][l] == kMinusInfinity;
    }
    if (empty) continue;
    double sum = 0;
    for (const std::int64_t j : keys.counted) {
      const double weight = std::exp(keys.u.value[j][l] - largest);
      sum += weight;
      for (std::int64_t c = 0; c < keys.v.width; ++c) state.values[l][c] += weight * keys.v[j][c];
    }
    state.lse[0][l] = largest + std::log(sum);
    for (std::int64_t c = 0; c < keys.v.width; ++c) state.values[l][c] /= sum;
  }
  return state;
}

}  // namespace lln::reference
