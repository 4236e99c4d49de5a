// The two ways in which the plain evaluation computes one part (LLN, or softmax over visible keys)
// of one head: the factorised form for bidirectional LLN, and rows of the quadratic form otherwise.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <vector>

#include "lln/problem.h"

namespace lln::conformance {

struct Matrix {
  std::int64_t rows = 0;
  std::int64_t columns = 0;
  std::vector<float> data;

  Matrix() = default;
  Matrix(std::int64_t r, std::int64_t c)
      : rows(r), columns(c), data(static_cast<std::size_t>(r * c), 0.0F) {}
  float* operator[](std::int64_t row) { return data.data() + row * columns; }
  const float* operator[](std::int64_t row) const { return data.data() + row * columns; }
};

// A tensor beside the same sums taken over absolute values.
struct Sized {
  Matrix value;
  Matrix size;
  Sized() = default;
  Sized(std::int64_t rows, std::int64_t columns) : value(rows, columns), size(rows, columns) {}
};

// One part of one head. a and u are the exponents f(alpha q) and f(beta k) of LLN, or q and k.
struct Part {
  DType dtype = DType::f32;  // that intermediate tensors are rounded to
  bool lln = true;           // otherwise scores are dot products
  Matrix a, u, v, g;
  // The keys that a row sees, in order. For the factorised form: those that all rows see.
  std::function<void(std::int64_t row, std::vector<std::int64_t>& keys)> visible;
  // Of the factorised form: the gradient of the state of its keys, [1, dim] and [dim, dim_v], where
  // there is one.
  Matrix dlse = {}, dvalues = {};
};

struct PartResult {
  Sized o;
  Sized da, du, dv;           // empty without a gradient
  Sized lse, channel_values;  // of the factorised form: [1, dim], [dim, dim_v]
  double exponent = 0;        // the largest that occurs
};

// Rounds as the dtype does, but without its limits: a plain f16 evaluation that overflows would
// measure nothing.
float round_significand(DType dtype, float x);

PartResult evaluate_factorised(const Part& part, bool backward);
PartResult evaluate_rows(const Part& part, bool backward);

}  // namespace lln::conformance
