// A sequence that is cut into pieces, uneven and empty ones among them, gives what it gives uncut.
// Diagonal blocks of pieces are in pieces_blocks_test.cc.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <limits>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "api/kernel.h"
#include "pieces_run.h"

namespace lln::test {
namespace {

using conformance::InputStyle;
using conformance::KeyPattern;
using conformance::ParameterForm;

const std::vector<std::int64_t> kCuts = {0, 0, 1, 64, 64, 131, 150, 150};
const std::vector<std::int64_t> kShortCuts = {0, 3, 3, 4, 20, 20};
const char* const kFeatures[] = {"exp", "elu", "relu", "softplus", "power2"};
const KeyPattern kPatterns[] = {KeyPattern::all, KeyPattern::lengths, KeyPattern::left_padding,
                                KeyPattern::holes};

Case pattern_case(std::string problem, KeyPattern keys) {
  Case c = make_case(problem + (keys == KeyPattern::all ? "" : ":masked"));
  c.keys = keys;
  c.parameters = ParameterForm::sequence;
  return c;
}

const char* const kKinds[] = {"lln", "lln:causal"};

TEST(Pieces, InF64) {
  for (const std::string kind : kKinds) {
    for (const KeyPattern keys : kPatterns) {
      expect_pieces({pattern_case("forward:f64:cpu:b3h4k2n20d5v3:" + kind, keys), kShortCuts},
                    1e-12);
    }
    for (const std::string feature : kFeatures) {
      const Case c = make_case("forward:f64:cpu:b1h2n20d5v3:" + kind + ":feature=" + feature);
      expect_pieces({c, kShortCuts}, 1e-12);
    }
  }
}

TEST(Pieces, InSmallerTypes) {
  for (const std::string kind : kKinds) {
    for (const std::string type : {"f32", "f16", "bf16"}) {
      for (const KeyPattern keys : kPatterns) {
        const Case c = pattern_case("forward:" + type + ":cpu:b3h4k2n150d24v16:" + kind, keys);
        expect_pieces({c, kCuts}, 1e-5);
      }
      for (const std::string feature : kFeatures) {
        const Case c =
            make_case("forward:" + type + ":cpu:b1h2n150d16:" + kind + ":feature=" + feature);
        expect_pieces({c, kCuts}, 1e-5);
      }
    }
    const Case c = make_case("forward:f32:cpu:b1h2k1n3000d8:" + kind);
    expect_pieces({c, {0, 2000, 2001, 3000}}, 1e-5);
  }
}

// Pieces of a row of packed sequences hold parts of some and nothing of the others.
TEST(Pieces, Packed) {
  for (const std::string kind : kKinds) {
    for (const std::string type : {"f64", "f32"}) {
      Case c = make_case("forward:" + type + ":cpu:b1h4k2n150d8v5:" + kind + ":packed=5");
      c.lengths = {30, 0, 1, 70, 49};
      c.parameters = ParameterForm::sequence;
      expect_pieces({c, kCuts}, type == "f64" ? 1e-12 : 1e-5);
    }
  }
}

// A key that is 200 larger, in exponent, erases neither earlier pieces nor earlier rows.
TEST(Pieces, LargeKeys) {
  for (const std::int64_t at : {0, 1, 63, 64, 130, 149}) {
    for (const std::string type : {"f64", "f32"}) {
      const double tolerance = type == "f64" ? 1e-11 : 1e-4;
      Case c = make_case("forward:" + type + ":cpu:b1h2n150d8:lln");
      c.style = InputStyle::spike;
      c.spike_at = at;
      expect_bidirectional({c, kCuts}, tolerance);
      c.problem.causal = true;
      expect_pieces({c, kCuts}, tolerance);
    }
  }
}

// Results of threads are those of one, to the last bit, with states too. 2048 tokens are one
// segment more than they would be if they began with one.
TEST(Pieces, ThreadsChangeNothing) {
  for (const std::string kind :
       {"lln:state", "lln:causal:state", "lln+diag16:causal:state",
        "lln+diag16:state:block_origins", "lln+diag16:causal:state:block_origins"}) {
    for (const std::string problem :
         {"forward:f32:cpu:b1h2k1n2048d8:", "backward:f32:cpu:b1h2k1n2048d8:",
          "forward:f32:cpu:b3h16k8n300d8:", "backward:f32:cpu:b3h16k8n300d8:"}) {
      Case c = make_case(problem + kind + ":masked");
      c.keys = KeyPattern::left_padding;
      c.parameter_gradients = true;
      c.saved = c.problem.op == Op::forward;
      const TensorSet alone = run(c);
      for (const int threads : {2, 5, 17}) {
        ThreadPool pool(threads);
        const TensorSet together = run(c, {.parallel = &pool});
        for (const TensorSet::Entry& entry : alone.entries()) {
          EXPECT_EQ(first_difference(together.at(entry.name), 0, entry.tensor), "")
              << entry.name << " of " << to_string(c) << " on " << threads << " threads";
        }
      }
    }
  }
}

// No keys anywhere: rows and gradients of zero, whatever the empty state holds beside -inf.
TEST(Pieces, NothingAtAll) {
  for (const std::string type : {"f64", "f32", "bf16"}) {
    for (const std::string form : {"n5m0d4:lln:state", "n0d4:lln:causal:state"}) {
      Case c = make_case("backward:" + type + ":cpu:b1h2k1" + form);
      Inputs in = conformance::make_inputs(c, c.problem.dtype);
      const double nan = std::numeric_limits<double>::quiet_NaN();
      for (Tensor* tensor : {&in.state_lse, &in.state_values, &in.dsaved_lse, &in.dsaved_values}) {
        tensor->for_each([&](auto s, auto h, auto n, auto ch) {
          tensor->set(s, h, n, ch, tensor == &in.state_lse ? kMinusInfinity : nan);
        });
      }
      const TensorSet gradients = run(c, in);
      for (const TensorSet::Entry& entry : gradients.entries()) {
        EXPECT_EQ(first_difference(entry.tensor, 0, zeros(DType::f64, entry.tensor.shape())), "")
            << entry.name << " of " << to_string(c);
      }
      c.problem.op = Op::forward;
      c.saved = true;
      const TensorSet out = run(c, in);
      EXPECT_EQ(first_difference(out.at("o"), 0, zeros(DType::f64, out.at("o").shape())), "");
      EXPECT_EQ(out.at("key_lse").get(0, 0, 0, 0), kMinusInfinity);
      EXPECT_EQ(out.at("channel_values").get(0, 0, 0, 0), 0);
    }
  }
}

// Keys, but none in the given state: as if it were not given.
TEST(Pieces, EmptyGivenState) {
  for (const std::string kind : {"lln", "lln:causal"}) {
    Case with = make_case("backward:f32:cpu:b1h2n70d8:" + kind + ":state");
    Inputs in = conformance::make_inputs(with, DType::f32);
    in.state_lse.for_each(
        [&](auto s, auto h, auto n, auto ch) { in.state_lse.set(s, h, n, ch, kMinusInfinity); });
    in.dsaved_lse = zeros(DType::f32, in.dsaved_lse.shape());
    in.dsaved_values = zeros(DType::f32, in.dsaved_values.shape());
    const TensorSet found = run(with, in);
    const TensorSet plain = run(make_case("backward:f32:cpu:b1h2n70d8:" + kind));
    for (const TensorSet::Entry& entry : plain.entries()) {
      EXPECT_EQ(first_difference(found.at(entry.name), 0, entry.tensor), "") << entry.name;
    }
    for (const char* name : {"dstate_lse", "dstate_values"}) {
      const Tensor& gradient = found.at(name);
      EXPECT_EQ(first_difference(gradient, 0, zeros(DType::f32, gradient.shape())), "") << name;
    }
  }
}

// c of a given state acts as the largest exponent there is where f32 has no larger one, as keys do:
// no NaN comes from it, neither in rows nor in gradients.
TEST(Pieces, ExponentsAtTheLimit) {
  for (const std::string form : {"n70d8:lln", "n70d8:lln:causal", "n70m0d8:lln"}) {
    for (const double c_l : {2.3e38, 3.4e38, -2.3e38, -3.4e38}) {
      for (const bool everywhere : {false, true}) {
        Case c = make_case("backward:f32:cpu:b1h2k1" + form + ":state");
        c.parameter_gradients = true;
        Inputs in = conformance::make_inputs(c, DType::f32);
        in.state_lse.for_each([&](auto s, auto h, auto n, auto l) {
          if (everywhere || l % 3 == 0) in.state_lse.set(s, h, n, l, c_l);
        });
        for (const Op op : {Op::backward, Op::forward}) {
          c.problem.op = op;
          const TensorSet expected = run(c, in, {.kernel = "reference"});
          const TensorSet found = run(c, in);
          for (const TensorSet::Entry& entry : found.entries()) {
            EXPECT_EQ(first_difference(entry.tensor, 2e-5, expected.at(entry.name)), "")
                << entry.name << " of " << to_string(c) << ", c = " << c_l
                << (everywhere ? " everywhere" : "");
          }
        }
      }
    }
  }
}

TEST(Pieces, KernelsThatTakeNoPiecesSaySo) {
  const std::set<std::string_view> of_devices = {"cuda-plain", "cuda-padded", "cuda-tiled",
                                                 "cuda-tiled-f32", "cuda-sm90"};
  for (const Op op : {Op::forward, Op::backward, Op::append, Op::step}) {
    const bool pass = op == Op::forward || op == Op::backward;
    ASSERT_FALSE(kernels(op).empty());
    for (const Kernel& kernel : kernels(op)) {
      const bool takes = kernel.device == DeviceKind::cpu || of_devices.contains(kernel.name);
      EXPECT_EQ(kernel.takes_pieces, pass && takes) << kernel.name << ' ' << to_string(op);
    }
  }
  // Of the kernels of devices the plain ones alone know blocks that begin before their piece.
  for (const std::string text : {"forward:f32:cuda:b1h1n8d8:lln+diag4:state:block_origins",
                                 "backward:f32:cuda:b1h1n8d8:diag4:block_origins"}) {
    for (const auto& candidate : explain(parse_problem(text)).candidates) {
      if (candidate.kernel == "cuda-plain") continue;
      EXPECT_NE(candidate.refusal, "") << candidate.kernel << " takes " << text;
    }
  }
  // Kernels of decoding stand for any that did not say that they take pieces.
  Problem state = parse_problem("append:f32:cpu:b1h1n8d8:lln");
  state.state = true;
  Problem origins = parse_problem("append:f32:cpu:b1h1n8d8:lln+diag4");
  origins.block_origins = true;
  for (const Problem& problem : {state, origins}) {
    for (const auto& candidate : explain(problem).candidates) {
      if (!candidate.kernel.starts_with("cpu-")) continue;
      EXPECT_NE(candidate.refusal.find("takes no pieces of a sequence"), std::string::npos)
          << candidate.kernel << ": " << candidate.refusal;
    }
  }
}

}  // namespace
}  // namespace lln::test
