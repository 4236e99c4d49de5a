// The plain kernels, which take what is difficult, under the rules of tests/adversarial_test.cc.
// SPDX-License-Identifier: Apache-2.0
#include <cmath>
#include <limits>
#include <string>

#include "conformance/run.h"
#include "device_run.h"
#include "lln/error.h"

namespace lln::test {
namespace {

using conformance::InputStyle;
using conformance::KeyPattern;

constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

const std::string kKernel = "cuda-plain";

class CudaPlain : public OnDevice {};

TensorSet run_plain(const Case& c, const Inputs& in) {
  return run_on_device(c, in, {.kernel = kKernel});
}

void expect_case(Case c) {
  c.problem = on_device(c.problem);
  ThreadPool pool;
  for (const conformance::CaseResult& result : conformance::run_case(c, {&kKernel, 1}, &pool)) {
    EXPECT_EQ(result.verdict, conformance::Verdict::passed) << to_string(c) << '\n' << result.text;
  }
}

const char* const kKinds[] = {"lln", "lln:causal", "lln+diag48", "lln+diag48:causal",
                              "diag48:causal"};

void expect_both_directions(Case c, const std::string& problem) {
  for (const std::string op : {"forward:", "backward:"}) {
    c.problem = parse_problem(op + problem);
    c.parameter_gradients = true;
    expect_case(c);
  }
}

TEST_F(CudaPlain, DifficultValues) {
  for (const std::string kind : kKinds) {
    for (const InputStyle style :
         {InputStyle::large_keys, InputStyle::constant_rows, InputStyle::denormal}) {
      expect_both_directions({.style = style}, "f32:cpu:b1h2n150d16:" + kind);
    }
    for (const std::int64_t at : {0, 31, 32, 63, 64, 199}) {
      expect_both_directions({.style = InputStyle::spike, .spike_at = at},
                             "f32:cpu:b1h2n200d8:" + kind);
    }
    for (const std::string type : {"f32", "bf16", "f16"}) {
      Case c = make_case("forward:" + type + ":cpu:b1h2n150d16:" + kind);
      c.style = InputStyle::large_values;
      expect_case(c);
    }
  }
}

TEST_F(CudaPlain, RowsWithoutKeysAreZeroWithZeroGradients) {
  for (const std::string kind : kKinds) {
    Case c = make_case("forward:f32:cpu:b2h2n70d16:" + kind + ":masked");
    c.keys = KeyPattern::lengths;
    c.parameter_gradients = true;
    Inputs in = conformance::make_inputs(c, DType::f32);
    in.key_lengths = {0, 0};
    for (Tensor* t : {&in.k, &in.v}) {
      t->for_each([&](auto b, auto h, auto n, auto ch) { t->set(b, h, n, ch, kNaN); });
    }
    for (const Op op : {Op::forward, Op::backward}) {
      c.problem.op = op;
      const auto zero = [](auto, auto, auto, auto) { return std::optional(0.0); };
      const TensorSet outputs = run_plain(c, in);
      for (const TensorSet::Entry& entry : outputs.entries()) {
        EXPECT_EQ(first_difference(entry.tensor, 0, zero), "") << entry.name << to_string(c);
      }
    }
  }
}

TEST_F(CudaPlain, InfiniteKeysActAsTheirLimit) {
  for (const std::string kind : {"lln", "lln:causal"}) {
    const Case c = make_case("forward:f32:cpu:b1h1n70d8:" + kind);
    Inputs in = conformance::make_inputs(c, DType::f32);
    in.k.set(0, 0, 40, 3, std::numeric_limits<double>::infinity());
    in.k.set(0, 0, 41, 2, -std::numeric_limits<double>::infinity());
    const TensorSet expected = run(c, in, {.kernel = "reference"});
    EXPECT_EQ(first_difference(run_plain(c, in).at("o"), 1e-5, expected.at("o")), "")
        << to_string(c);
  }
}

TEST_F(CudaPlain, NanReachesOnlyRowsThatSeeIt) {
  for (const std::string kind : {"lln", "lln:causal", "lln+diag48:causal", "diag48:causal"}) {
    const Case c = make_case("forward:f32:cpu:b1h1n150d16:" + kind);
    for (const bool in_values : {true, false}) {
      Inputs in = conformance::make_inputs(c, DType::f32);
      (in_values ? in.v : in.k).set(0, 0, 20, 3, kNaN);
      const TensorSet expected = run(c, in, {.kernel = "reference"});
      const TensorSet outputs = run_plain(c, in);
      outputs.at("o").for_each([&](auto b, auto h, auto n, auto ch) {
        EXPECT_EQ(std::isnan(outputs.at("o").get(b, h, n, ch)),
                  std::isnan(expected.at("o").get(b, h, n, ch)))
            << to_string(c) << (in_values ? ": v" : ": k") << ", row " << n << ", channel " << ch;
      });
    }
  }
}

TEST_F(CudaPlain, LargeValuesAndExponents) {
  for (const std::string kind : {"diag48", "diag48:causal", "lln+diag48", "lln+diag48:causal"}) {
    const Case c = make_case("backward:f32:cpu:b1h1n96d64:" + kind);
    Inputs in = conformance::make_inputs(c, DType::f32);
    in.v.for_each([&](auto b, auto h, auto n, auto ch) {
      in.v.set(b, h, n, ch, 1e31 * in.v.get(b, h, n, ch));
    });
    for (Tensor* t : {&in.q, &in.k}) {
      t->for_each([&](auto b, auto h, auto n, auto ch) {
        t->set(b, h, n, ch, 1.41 + 0.05 * t->get(b, h, n, ch));
      });
    }
    const TensorSet outputs = run_plain(c, in);
    for (const TensorSet::Entry& entry : outputs.entries()) {
      entry.tensor.for_each([&](auto b, auto h, auto n, auto ch) {
        EXPECT_TRUE(std::isfinite(entry.tensor.get(b, h, n, ch))) << to_string(c) << entry.name;
      });
    }
  }
  for (const std::string kind : {"lln", "lln:causal"}) {
    const Case c = make_case("forward:f32:cpu:b1h1n300d64:" + kind);
    Inputs in = conformance::make_inputs(c, DType::f32);
    in.k.for_each([&](auto b, auto h, auto n, auto ch) {
      in.k.set(b, h, n, ch, 40 * in.k.get(b, h, n, ch));
      in.v.set(b, h, n, ch, 1);
    });
    const auto one = [](auto, auto, auto, auto) { return std::optional(1.0); };
    EXPECT_EQ(first_difference(run_plain(c, in).at("o"), 2e-6, one), "") << to_string(c);
  }
}

// Several pieces, and a sequence gives the same bits alone and behind another one.
TEST_F(CudaPlain, NeighboursChangeNothing) {
  for (const std::string kind : {"lln", "lln+diag48", "lln:causal", "lln+diag48:causal"}) {
    for (const std::string op : {"forward", "backward"}) {
      Case together = make_case(op + ":f32:cpu:b1h2k1n700d6:" + kind + ":packed=2");
      together.lengths = {60, 640};
      together.parameters = conformance::ParameterForm::one;
      Case alone = make_case(op + ":f32:cpu:b1h2k1n640d6:" + kind);
      alone.parameters = conformance::ParameterForm::one;
      const Inputs in = conformance::make_inputs(together, DType::f32);
      Inputs own = conformance::make_inputs(alone, DType::f32);
      const std::pair<const Tensor*, Tensor*> tensors[] = {
          {&in.q, &own.q}, {&in.k, &own.k}, {&in.v, &own.v}, {&in.g, &own.g}};
      for (const auto& [from, to] : tensors) {
        to->for_each([&, from = from, to = to](auto b, auto h, auto n, auto ch) {
          to->set(b, h, n, ch, from->get(b, h, n + 60, ch));
        });
      }
      const TensorSet expected = run_plain(together, in);
      const TensorSet outputs = run_plain(alone, own);
      for (const TensorSet::Entry& entry : outputs.entries()) {
        const Tensor& other = expected.at(entry.name);
        EXPECT_EQ(first_difference(entry.tensor, 0,
                                   [&](auto b, auto h, auto n, auto ch) {
                                     return std::optional(other.get(b, h, n + 60, ch));
                                   }),
                  "")
            << entry.name << " of " << to_string(alone);
      }
    }
  }
}

// Where cu_seqlens are wrong no sequence has tokens, and every row is written all the same.
TEST_F(CudaPlain, RowsOfNoSequenceAreZero) {
  for (const std::string op : {"forward", "backward"}) {
    Case c = make_case(op + ":bf16:cpu:b1h2n90d16:lln+diag16:packed=2");
    c.lengths = {20, 70};
    c.weights = conformance::WeightForm::token;
    c.parameter_gradients = true;
    Inputs in = conformance::make_inputs(c, DType::bf16);
    in.cu_seqlens_q = in.cu_seqlens_k = {0, 100, 90};
    const TensorSet outputs = run_plain(c, in);
    const auto zero = [](auto, auto, auto, auto) { return std::optional(0.0); };
    for (const TensorSet::Entry& entry : outputs.entries()) {
      EXPECT_EQ(first_difference(entry.tensor, 0, zero), "")
          << entry.name << " of " << to_string(c);
    }
    EXPECT_THROW(run_plain(c, in), Error);  // what the call before reported
  }
}

}  // namespace
}  // namespace lln::test
