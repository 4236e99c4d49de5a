// Running the API on the data of a case: what most tests do. The case names the problem, its inputs
// may be edited before the run, and results come back as tensors by name.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "conformance/data.h"

namespace lln::test {

using conformance::Case;
using conformance::Inputs;
using conformance::Tensor;
using conformance::TensorSet;

inline Case make_case(std::string_view problem) {
  Case c;
  c.problem = parse_problem(problem);
  return c;
}

// Forward or backward, as the case says, on the first kernel that takes it or the one in `exec`.
inline TensorSet run(const Case& c, const Inputs& in, const Exec& exec = {}) {
  TensorSet outputs = conformance::make_outputs(c, in, c.problem.dtype);
  if (c.problem.op == Op::forward) {
    attention_forward(in.views(), conformance::forward_views(outputs), conformance::options(c),
                      exec);
  } else {
    attention_backward(in.views(), conformance::backward_views(outputs, in),
                       conformance::options(c), exec);
  }
  return outputs;
}

inline TensorSet run(const Case& c, const Exec& exec = {}) {
  return run(c, conformance::make_inputs(c, c.problem.dtype), exec);
}

}  // namespace lln::test
