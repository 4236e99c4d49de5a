// The backward of the reference against central finite differences of its forward, all in f64:
// every element of every input that has a gradient.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "attention_run.h"

namespace lln::test {
namespace {

using conformance::InputStyle;
using conformance::KeyPattern;
using conformance::ParameterForm;
using conformance::WeightForm;

constexpr Exec kReference{.kernel = "reference"};

double loss(const Case& backward, const Inputs& in) {
  Case forward = backward;
  forward.problem.op = Op::forward;
  forward.saved = backward.problem.state;
  const TensorSet outputs = run(forward, in, kReference);
  double sum = 0;
  const auto add = [&](const Tensor& output, const Tensor& gradient) {
    output.for_each([&](std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t c) {
      const double x = output.get(b, h, n, c);
      if (std::isfinite(x)) sum += x * gradient.get(b, h, n, c);  // c of no keys is -inf
    });
  };
  add(outputs.at("o"), in.g);
  if (forward.saved) {
    add(outputs.at("key_lse"), in.dsaved_lse);
    add(outputs.at("channel_values"), in.dsaved_values);
  }
  return sum;
}

// Keys that are not valid hold NaN, are never read, and must have zero gradients; so must an empty
// state, whose c = -inf takes no step.
void expect_gradient(const Case& c, Inputs& in, Tensor& input, const Tensor& gradient,
                     const std::string& name) {
  constexpr double kStep = 1e-5;       // truncation about kStep^2, rounding about 1e-16 / kStep
  constexpr double kTolerance = 2e-8;  // relative to gradients of order one
  input.for_each([&](std::int64_t b, std::int64_t h, std::int64_t n, std::int64_t ch) {
    const double x = input.get(b, h, n, ch);
    double expected = 0;
    if (std::isfinite(x)) {
      input.set(b, h, n, ch, x + kStep);
      const double above = loss(c, in);
      input.set(b, h, n, ch, x - kStep);
      expected = (above - loss(c, in)) / (2 * kStep);
      input.set(b, h, n, ch, x);
    }
    const double found = gradient.get(b, h, n, ch);
    EXPECT_NEAR(found, expected, kTolerance * (1 + std::abs(expected)))
        << name << '[' << b << ", " << h << ", " << n << ", " << ch << "] of " << to_string(c);
  });
}

void expect_gradients(Case c) {
  c.parameter_gradients = true;
  c.parameters = c.parameters == ParameterForm::head ? ParameterForm::sequence : c.parameters;
  Inputs in = conformance::make_inputs(c, DType::f64);
  const TensorSet found = run(c, in, kReference);
  const std::pair<const char*, Tensor*> inputs[] = {{"dq", &in.q},
                                                    {"dk", &in.k},
                                                    {"dv", &in.v},
                                                    {"dalpha", &in.alpha},
                                                    {"dbeta", &in.beta},
                                                    {"dmix", &in.mix},
                                                    {"dlln_weight", &in.lln_weight},
                                                    {"ddiag_weight", &in.diag_weight},
                                                    {"dstate_lse", &in.state_lse},
                                                    {"dstate_values", &in.state_values}};
  for (const auto& [name, input] : inputs) {
    if (input->given()) expect_gradient(c, in, *input, found.at(name), name);
  }
}

TEST(Gradient, KindsAndFeatures) {
  for (const std::string causal : {"", ":causal"}) {
    for (const std::string kind : {"diag3", "softmax"}) {
      expect_gradients(make_case("backward:f64:cpu:b1h2n7d3v2:" + kind + causal));
    }
    for (const std::string feature : {"exp", "elu", "relu", "softplus", "power2", "power1.5"}) {
      for (const std::string kind : {"lln", "lln+diag3"}) {
        expect_gradients(
            make_case("backward:f64:cpu:b1h1n6d3v2:" + kind + causal + ":feature=" + feature));
      }
    }
  }
}

TEST(Gradient, FormsOfWeights) {
  for (const std::string causal : {"", ":causal"}) {
    for (const WeightForm form : {WeightForm::constant, WeightForm::call, WeightForm::head,
                                  WeightForm::channel, WeightForm::token}) {
      for (const bool two : {false, true}) {
        Case c = make_case("backward:f64:cpu:b2h2n5d2v3:lln+diag2" + causal);
        c.weights = form;
        c.two_weights = two;
        expect_gradients(c);
      }
    }
  }
}

TEST(Gradient, FormsOfAlphaAndBeta) {
  for (const ParameterForm form : {ParameterForm::one, ParameterForm::sequence}) {
    Case c = make_case("backward:f64:cpu:b2h4k2n4d2:lln+diag2:causal");
    c.parameters = form;
    expect_gradients(c);
  }
}

TEST(Gradient, GroupedHeadsAndCrossAttention) {
  expect_gradients(make_case("backward:f64:cpu:b1h4k1n5d2:lln"));
  expect_gradients(make_case("backward:f64:cpu:b1h4k2n5d2:softmax:causal"));
  expect_gradients(make_case("backward:f64:cpu:b2h2n3m6d3:lln:feature=softplus"));
  expect_gradients(make_case("backward:f64:cpu:b1h2k1n6m3d3:softmax"));
}

TEST(Gradient, MasksAndPackedSequences) {
  for (const std::string kind : {"lln", "lln:causal", "lln+diag3", "lln+diag3:causal", "softmax",
                                 "softmax:causal", "diag3"}) {
    for (const KeyPattern keys :
         {KeyPattern::lengths, KeyPattern::left_padding, KeyPattern::holes}) {
      Case c = make_case("backward:f64:cpu:b2h1n7d2:" + kind + ":masked");
      c.keys = keys;
      expect_gradients(c);
    }
    Case c = make_case("backward:f64:cpu:b1h2k1n8d2:" + kind + ":packed=4");
    c.lengths = {3, 0, 1, 4};
    expect_gradients(c);
  }
}

// Of the given state, and of everything else where the state of all keys has a gradient of its own.
TEST(Gradient, States) {
  for (const std::string kind : {"lln", "lln:causal", "lln+diag3", "lln+diag3:causal"}) {
    for (const std::string feature : {"exp", "elu", "softplus"}) {
      expect_gradients(
          make_case("backward:f64:cpu:b3h2k1n6d3v2:" + kind + ":state:feature=" + feature));
    }
    for (const KeyPattern keys :
         {KeyPattern::lengths, KeyPattern::left_padding, KeyPattern::holes}) {
      Case c = make_case("backward:f64:cpu:b2h1n7d2:" + kind + ":masked:state");
      c.keys = keys;
      expect_gradients(c);
    }
    Case c = make_case("backward:f64:cpu:b1h2k1n8d2:" + kind + ":packed=4:state");
    c.lengths = {3, 0, 1, 4};
    expect_gradients(c);
  }
  expect_gradients(make_case("backward:f64:cpu:b3h2k1n5m0d3v2:lln:state"));
  expect_gradients(make_case("backward:f64:cpu:b3h2k1n0m5d3v2:lln:state"));
}

TEST(Gradient, BlockOrigins) {
  for (const std::string kind : {"diag3", "diag3:causal", "lln+diag3:state", "lln+diag3:causal"}) {
    expect_gradients(make_case("backward:f64:cpu:b5h2k1n7d2:" + kind + ":block_origins"));
    Case c = make_case("backward:f64:cpu:b5h1n7d2:" + kind + ":masked:block_origins");
    c.keys = KeyPattern::holes;
    expect_gradients(c);
  }
}

}  // namespace
}  // namespace lln::test
