// When an output counts as right. For one tensor, with everything in absolute terms,
//
//   error     = max |x - reference|
//   tolerance = 2 max |plain - reference|                          a plain evaluation in that dtype
//             + u(dtype) max |reference| + half its least subnormal      rounding of the result
//             + u(f32) (1 + E) max S                               rounding inside the kernel
//
// where u is the unit roundoff, E the largest exponent that occurs (|f(alpha q)| + |f(beta k)|, or
// |q| |k| / sqrt(dim) of the softmax parts: an exponent in f32 carries an error that grows with
// it), and S the same sums as the tensor itself taken over absolute values, so that a gradient that
// cancels to nothing is not held to a tolerance of nothing. Where tensor cores multiply numbers of
// 16 bits, the result may be the neighbour of the right one: the term of its rounding is then the
// distance of two such numbers at max |reference|. (The plain evaluation has no error to allow for
// it where a row sees one key.)
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "conformance/tensor.h"

namespace lln::conformance {

struct Comparison {
  std::string name;
  double largest = 0;      // max |reference|
  double error = 0;        // infinite where NaN, infinities or gaps differ
  double plain_error = 0;  // 0 where the plain evaluation overflows: then rounding alone counts
  double rounding = 0;
  std::string mismatch;  // where the first NaN, infinity or overwritten gap differs

  double tolerance() const { return 2 * plain_error + rounding; }
  double ratio() const;
  bool passed() const { return ratio() <= 1; }
};

std::string to_string(const Comparison& comparison);

double unit_roundoff(DType dtype);

enum class Operands { f32, narrow };  // of the products of a kernel

// How an element of a result comes about. `rounded_terms`: it is a sum of so many numbers, each of
// them rounded by `term_roundoff` by itself; 0: it is not.
struct Making {
  Operands operands = Operands::f32;
  double rounded_terms = 0, term_roundoff = 0;
};

Comparison compare(const std::string& name, const Tensor& x, const Tensor& reference,
                   const Tensor& plain, const Tensor& sizes, double exponent,
                   const Making& making = {});

}  // namespace lln::conformance
