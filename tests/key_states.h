// States of sets of keys in tests: what they are in memory, the state of a union, and the gradient
// of that, in plain double.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "attention_run.h"

namespace lln::test {

inline constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// Every element plus that of another tensor of the same shape.
inline void add(const Tensor& x, Tensor& sum) {
  x.for_each([&](auto b, auto h, auto n, auto c) {
    sum.set(b, h, n, c, sum.get(b, h, n, c) + x.get(b, h, n, c));
  });
}

inline Tensor zeros(DType dtype, const Shape& shape) {
  Tensor tensor(dtype, shape);
  tensor.for_each([&](auto b, auto h, auto n, auto c) { tensor.set(b, h, n, c, 0); });
  return tensor;
}

// A state, or the gradient of one.
struct State {
  State(const Problem& p, DType dtype)
      : lse(zeros(dtype, {p.sequences, p.heads_k, 1, p.dim})),
        values(zeros(dtype, {p.sequences, p.heads_k, p.dim, p.dim_v})) {}
  AttentionState read() const { return {lse.view(), values.view()}; }
  AttentionSaved write() { return {lse.view(), values.view()}; }
  Tensor lse, values;
};

inline std::vector<const State*> pointers(const std::vector<State>& states) {
  std::vector<const State*> list;
  for (const State& state : states) list.push_back(&state);
  return list;
}

// exp(c1 - c), 0 for the empty set.
inline double share(double part, double whole) {
  return part == kMinusInfinity ? 0 : std::exp(part - whole);
}

inline State merged(const Problem& p, DType dtype, const std::vector<const State*>& parts) {
  State all(p, dtype);
  all.lse.for_each([&](auto s, auto h, auto, auto l) {
    double largest = kMinusInfinity;
    for (const State* part : parts) largest = std::max(largest, part->lse.get(s, h, 0, l));
    double sum = 0;
    for (const State* part : parts) sum += share(part->lse.get(s, h, 0, l), largest);
    const double c = sum == 0 ? kMinusInfinity : largest + std::log(sum);
    all.lse.set(s, h, 0, l, c);
    for (std::int64_t ch = 0; ch < p.dim_v; ++ch) {
      double value = 0;
      for (const State* part : parts) {
        value += share(part->lse.get(s, h, 0, l), largest) * part->values.get(s, h, l, ch);
      }
      all.values.set(s, h, l, ch, sum == 0 ? 0 : value / sum);
    }
  });
  return all;
}

// Adds to the gradient of a part what that of the merged state sends there.
inline void add_part_gradient(const Problem& p, const State& part, const State& all,
                              const State& dall, State& dpart) {
  part.lse.for_each([&](auto s, auto h, auto, auto l) {
    const double e = share(part.lse.get(s, h, 0, l), all.lse.get(s, h, 0, l));
    double dc = dall.lse.get(s, h, 0, l);
    for (std::int64_t ch = 0; ch < p.dim_v; ++ch) {
      const double d = dall.values.get(s, h, l, ch);
      dc += d * (part.values.get(s, h, l, ch) - all.values.get(s, h, l, ch));
      dpart.values.set(s, h, l, ch, dpart.values.get(s, h, l, ch) + e * d);
    }
    dpart.lse.set(s, h, 0, l, dpart.lse.get(s, h, 0, l) + e * dc);
  });
}

}  // namespace lln::test
