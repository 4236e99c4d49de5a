// Running the API on the data of a case: what most tests do. The case names the problem, its inputs
// may be edited before the run, and results come back as tensors by name.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <cmath>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

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

// The kernels for tensors in host memory that this machine runs: not those for vector instructions
// that it does not have.
inline std::vector<std::string> kernels_here(Op op) {
  const std::string problem = to_string(op) + std::string(":f32:cpu:b1h1n8d8:lln");
  std::vector<std::string> names = kernel_names(op, DeviceKind::cpu);
  for (const Explanation::Candidate& candidate : explain(parse_problem(problem)).candidates) {
    if (candidate.refusal.starts_with("this CPU has no")) std::erase(names, candidate.kernel);
  }
  return names;
}

// Those of them that take a problem.
inline std::vector<std::string> kernels_for(const Problem& problem) {
  std::vector<std::string> names;
  for (const Explanation::Candidate& candidate : explain(problem).candidates) {
    if (candidate.refusal.empty()) names.push_back(candidate.kernel);
  }
  return names;
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

// Where a tensor first differs from expected(b, h, n, c) by more than the tolerance; empty when
// nowhere. Elements without an expected value are skipped; a NaN differs from every number.
template <class Expected>
std::string first_difference(const Tensor& found, double tolerance, Expected expected) {
  std::string text;
  found.for_each([&](std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t c) {
    if (!text.empty()) return;
    const std::optional<double> value = expected(b, h, n, c);
    if (!value || std::abs(found.get(b, h, n, c) - *value) <= tolerance) return;
    text = fmt::format("[{}, {}, {}, {}] is {}: expected {}, give or take {}", b, h, n, c,
                       found.get(b, h, n, c), *value, tolerance);
  });
  return text;
}

inline std::string first_difference(const Tensor& found, double tolerance, const Tensor& expected) {
  return first_difference(found, tolerance, [&](auto b, auto h, auto n, auto c) {
    return std::optional(expected.get(b, h, n, c));
  });
}

}  // namespace lln::test
