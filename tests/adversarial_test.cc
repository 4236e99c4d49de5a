// Values that break careless arithmetic: huge keys, one key far above all others anywhere, equal
// rows, numbers at both ends of the f32 range, rows without keys. Every kernel, both directions.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "attention_run.h"
#include "conformance/run.h"

namespace lln::test {
namespace {

using conformance::InputStyle;
using conformance::KeyPattern;
using conformance::Verdict;

const char* const kKinds[] = {"lln",           "lln:causal", "lln+diag48",    "lln+diag48:causal",
                              "diag48:causal", "softmax",    "softmax:causal"};

void expect_all_kernels_pass(const Case& c) {
  ThreadPool pool(2);
  for (const auto& result : conformance::run_case(c, kernel_names(c.problem.op), &pool)) {
    EXPECT_NE(result.verdict, Verdict::failed) << to_string(c) << " on " << result.kernel << '\n'
                                               << result.text;
  }
}

void expect_both_directions(Case c, const std::string& problem) {
  for (const std::string op : {"forward:", "backward:"}) {
    c.problem = parse_problem(op + problem);
    c.parameter_gradients = true;
    expect_all_kernels_pass(c);
  }
}

TEST(Adversarial, KeysTimesTenThousand) {
  for (const std::string kind : kKinds) {
    expect_both_directions({.style = InputStyle::large_keys}, "f32:cpu:b1h2n200d24:" + kind);
  }
}

// First, middle, on both sides of the usual chunk borders, last.
#ifdef LLN_QUICK_TESTS
constexpr std::int64_t kSpikes[] = {0, 63, 64, 199};
#else
constexpr std::int64_t kSpikes[] = {0, 31, 32, 63, 64, 65, 100, 127, 128, 199};
#endif

TEST(Adversarial, OneKeyTwoHundredLarger) {
  for (const std::string kind : kKinds) {
    for (const std::int64_t at : kSpikes) {
      expect_both_directions({.style = InputStyle::spike, .spike_at = at},
                             "f32:cpu:b1h2n200d8:" + kind);
    }
  }
  expect_both_directions({.style = InputStyle::spike, .spike_at = 63},
                         "bf16:cpu:b1h2n130d8:lln:causal");
}

TEST(Adversarial, ConstantRows) {
  for (const std::string kind : kKinds) {
    expect_both_directions({.style = InputStyle::constant_rows}, "f32:cpu:b1h2n150d16:" + kind);
  }
}

TEST(Adversarial, Denormals) {
  for (const std::string kind : kKinds) {
    expect_both_directions({.style = InputStyle::denormal}, "f32:cpu:b1h2n150d16:" + kind);
  }
}

// Outputs are means of values, so they are finite wherever the values are. Gradients hold products
// of values and may overflow by their nature.
TEST(Adversarial, ValuesNearTheLargestNumber) {
  for (const std::string type : {"f32", "bf16", "f16"}) {
    for (const std::string kind : kKinds) {
      Case c = make_case("forward:" + type + ":cpu:b1h2n150d16:" + kind);
      c.style = InputStyle::large_values;
      expect_all_kernels_pass(c);
    }
  }
}

TEST(Adversarial, RowsWithoutKeysAreZeroWithZeroGradients) {
  for (const std::string kind : kKinds) {
    Case c = make_case("forward:f32:cpu:b2h2n70d16:" + kind + ":masked");
    c.keys = KeyPattern::lengths;
    Inputs in = conformance::make_inputs(c, DType::f32);
    const float nan = std::numeric_limits<float>::quiet_NaN();
    in.key_lengths = {0, 0};
    for (Tensor* t : {&in.k, &in.v}) {
      t->for_each([&](auto b, auto h, auto n, auto ch) { t->set(b, h, n, ch, nan); });
    }
    for (const Op op : {Op::forward, Op::backward}) {
      c.problem.op = op;
      c.parameter_gradients = true;
      const TensorSet outputs = run(c, in);
      for (const TensorSet::Entry& entry : outputs.entries()) {
        const auto zero = [](auto, auto, auto, auto) { return std::optional(0.0); };
        EXPECT_EQ(first_difference(entry.tensor, 0, zero), "")
            << entry.name << " of " << to_string(c);
      }
    }
  }
}

// An infinite key or query acts as a very large one: no NaN comes from it.
TEST(Adversarial, InfiniteKeysActAsTheirLimit) {
  for (const std::string kind : {"lln", "lln:causal"}) {
    const Case c = make_case("forward:f32:cpu:b1h1n70d8:" + kind);
    Inputs in = conformance::make_inputs(c, DType::f32);
    in.k.set(0, 0, 40, 3, std::numeric_limits<double>::infinity());
    in.k.set(0, 0, 41, 2, -std::numeric_limits<double>::infinity());
    const TensorSet outputs = run(c, in);
    const TensorSet expected = run(c, in, {.kernel = "reference"});
    EXPECT_EQ(first_difference(outputs.at("o"), 1e-5, expected.at("o")), "") << to_string(c);
  }
}

}  // namespace
}  // namespace lln::test
