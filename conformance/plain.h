// What a user gets from plain tensor code in a dtype: the textbook evaluation in f32 arithmetic
// with every intermediate tensor rounded to that dtype. It serves as the measure of an acceptable
// error, never as the truth.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "conformance/data.h"

namespace lln::conformance {

struct Plain {
  TensorSet values;     // stored in f64
  TensorSet sizes;      // the same sums over absolute values (compare.h)
  double exponent = 0;  // the largest exponent that occurs
};

Plain evaluate_plain(const Case& c, const Inputs& in, Parallel* parallel);

}  // namespace lln::conformance
