// What the mathematics promises of every result, checked on the kernel that a caller gets by
// default: weights sum to one, keys have no order, the future never changes the past, shifts
// cancel.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>

#include "attention_run.h"

namespace lln::test {
namespace {

const char* const kKinds[] = {"lln",    "lln:causal",    "lln+diag16", "lln+diag16:causal",
                              "diag16", "diag16:causal", "softmax",    "softmax:causal"};
const char* const kCausalKinds[] = {"lln:causal", "lln+diag16:causal", "diag16:causal",
                                    "softmax:causal"};

template <class Change>
void change(Tensor& t, Change new_value) {
  t.for_each([&](auto b, auto h, auto n, auto c) {
    t.set(b, h, n, c, new_value(b, h, n, c, t.get(b, h, n, c)));
  });
}

TEST(Properties, ValuesOfOneGiveOne) {
  for (const std::string kind : kKinds) {
    const Case c = make_case("forward:f32:cpu:b2h4k2n150d24:" + kind);
    Inputs in = conformance::make_inputs(c, DType::f32);
    change(in.v, [](auto, auto, auto, auto, double) { return 1.0; });
    const TensorSet outputs = run(c, in);
    EXPECT_EQ(first_difference(outputs.at("o"), 1e-6,
                               [](auto, auto, auto, auto) { return std::optional(1.0); }),
              "")
        << to_string(c);
  }
}

TEST(Properties, KeysHaveNoOrder) {
  for (const std::string kind : {"lln", "softmax"}) {
    for (const std::string op : {"forward", "backward"}) {
      const Case c = make_case(op + ":f32:cpu:b1h2n100m150d24:" + kind);
      const Inputs in = conformance::make_inputs(c, DType::f32);
      Inputs permuted = in;
      const auto place = [](std::int64_t n) { return (n * 77 + 13) % 150; };  // 77 and 150: coprime
      const auto permute = [&](const Tensor& from, Tensor& to) {
        from.for_each([&](auto b, auto h, auto n, auto ch) {
          to.set(b, h, place(n), ch, from.get(b, h, n, ch));
        });
      };
      permute(in.k, permuted.k);
      permute(in.v, permuted.v);
      TensorSet expected = run(c, in);
      const TensorSet found = run(c, permuted);
      for (const char* name : {"dk", "dv"}) {
        if (!expected.has(name)) continue;
        const Tensor original = expected.at(name);
        permute(original, expected.at(name));
      }
      for (const TensorSet::Entry& entry : found.entries()) {
        EXPECT_EQ(first_difference(entry.tensor, 2e-5, expected.at(entry.name)), "")
            << entry.name << " of " << to_string(c);
      }
    }
  }
}

// The rows before t when everything from row t on becomes other - 2 x.
void expect_past_kept(const std::string& kind, const std::string& op, double other) {
  // Causal LLN picks a reference exponent per chunk of rows, which may move the last bits of a row;
  // the others keep every bit.
  const double tolerance = kind.starts_with("lln") ? 2e-6 : 0;
  const Case c = make_case(op + ":f32:cpu:b1h2k1n150d24:" + kind);
  const Inputs in = conformance::make_inputs(c, DType::f32);
  const char* name = op == "forward" ? "o" : "dq";
  const TensorSet before = run(c, in);
  for (const std::int64_t t : {1, 40, 64, 65, 149}) {
    Inputs changed = in;
    for (Tensor* tensor : {&changed.q, &changed.k, &changed.v, &changed.g}) {
      change(*tensor,
             [&](auto, auto, auto n, auto, double x) { return n < t ? x : other - 2 * x; });
    }
    const TensorSet after = run(c, changed);
    const auto past = [&](auto b, auto h, auto n, auto ch) {
      return n < t ? std::optional(before.at(name).get(b, h, n, ch)) : std::nullopt;
    };
    EXPECT_EQ(first_difference(after.at(name), tolerance, past), "")
        << name << " when rows from " << t << " on become " << other << " - 2 x in "
        << to_string(c);
  }
}

TEST(Properties, TheFutureNeverChangesThePast) {
  for (const std::string kind : kCausalKinds) {
    for (const std::string op : {"forward", "backward"}) {
      for (const double other : {3.0, 150.0}) expect_past_kept(kind, op, other);
    }
  }
}

TEST(Properties, NaNInTheFutureNeverReachesThePast) {
  for (const std::string kind : kCausalKinds) {
    for (const std::string op : {"forward", "backward"}) {
      expect_past_kept(kind, op, std::numeric_limits<double>::quiet_NaN());
    }
  }
}

// Tiny values in the past and one of these in the rows from t on: the past is that of a sequence
// which ends at t, within a few roundings of its own size, not of the size of what comes later.
void expect_tiny_past_kept(const std::string& kind, std::int64_t tokens, std::int64_t t,
                           double later) {
  constexpr double kTiny = 1e-32;
  constexpr double kTolerance = 2e-6;
  for (const std::string op : {"forward", "backward"}) {
    const auto make = [&](std::int64_t n) {
      return make_case(fmt::format("{}:f32:cpu:b1h2k1n{}d8:{}", op, n, kind));
    };
    const Case whole = make(tokens), past = make(t);
    Inputs in = conformance::make_inputs(whole, DType::f32);
    change(in.v, [&](auto, auto, auto n, auto, double x) { return n < t ? kTiny * x : later; });
    Inputs in_past = conformance::make_inputs(past, DType::f32);
    const auto cut = [](const Tensor& from, Tensor& to) {
      change(to, [&](auto b, auto h, auto n, auto c, double) { return from.get(b, h, n, c); });
    };
    cut(in.q, in_past.q);
    cut(in.k, in_past.k);
    cut(in.v, in_past.v);
    cut(in.g, in_past.g);
    const TensorSet found = run(whole, in);
    const TensorSet expected = run(past, in_past);
    const char* name = op == "forward" ? "o" : "dq";
    const Tensor& rows = expected.at(name);
    rows.for_each([&](auto b, auto h, auto n, auto) {
      // Gradients are differences of terms of the size of v, and may cancel to nothing.
      double size = op == "forward" ? 0 : kTiny;
      for (std::int64_t c = 0; c < 8; ++c) size = std::max(size, std::abs(rows.get(b, h, n, c)));
      for (std::int64_t c = 0; c < 8; ++c) {
        const double difference = found.at(name).get(b, h, n, c) - rows.get(b, h, n, c);
        ASSERT_LE(std::abs(difference), kTolerance * size)
            << name << " row " << n << " when v is " << later << " from row " << t << " on, "
            << to_string(whole);
      }
    });
  }
}

TEST(Properties, TheSizeOfTheFutureNeverChangesThePast) {
  for (const std::string kind : {"lln:causal", "lln+diag16:causal", "diag16:causal"}) {
    for (const double later : {3e38, -3e38, std::numeric_limits<double>::quiet_NaN()}) {
      for (const std::int64_t t : {1, 40, 64, 65, 149}) expect_tiny_past_kept(kind, 150, t, later);
      expect_tiny_past_kept(kind, 2500, 2100, later);
    }
  }
}

// exp(alpha (q + s) + beta k) is a common factor of the row, exp(beta s) one of the whole matrix.
TEST(Properties, ShiftsCancelInLln) {
  for (const std::string kind : {"lln", "lln:causal"}) {
    for (const std::string op : {"forward", "backward"}) {
      const Case c = make_case(op + ":f32:cpu:b1h2n150d24:" + kind);
      const Inputs in = conformance::make_inputs(c, DType::f32);
      Inputs shifted_q = in;
      change(shifted_q.q, [](auto, auto, auto n, auto, double x) {
        return x + 0.25 * static_cast<double>(n % 7);
      });
      Inputs shifted_k = in;
      change(shifted_k.k, [](auto, auto, auto, auto, double x) { return x - 2.5; });
      const TensorSet expected = run(c, in);
      for (const Inputs* shifted : {&shifted_q, &shifted_k}) {
        const TensorSet found = run(c, *shifted);
        for (const TensorSet::Entry& entry : found.entries()) {
          EXPECT_EQ(first_difference(entry.tensor, 5e-5, expected.at(entry.name)), "")
              << entry.name << " of " << to_string(c);
        }
      }
    }
  }
}

TEST(Properties, OneVectorAddedToAllKeysCancelsInSoftmax) {
  for (const std::string kind : {"softmax", "softmax:causal", "diag16"}) {
    const Case c = make_case("forward:f32:cpu:b1h2n150d24:" + kind);
    const Inputs in = conformance::make_inputs(c, DType::f32);
    Inputs shifted = in;
    change(shifted.k, [](auto, auto, auto, auto ch, double x) {
      return x + 0.5 * static_cast<double>(ch % 3);
    });
    EXPECT_EQ(first_difference(run(c, shifted).at("o"), 2e-5, run(c, in).at("o")), "")
        << to_string(c);
  }
}

// With one key, every row is its value, and no gradient reaches q or k.
TEST(Properties, OneKeyIsCopied) {
  for (const std::string kind : {"lln", "softmax"}) {
    Case c = make_case("forward:f32:cpu:b1h2n70m1d24:" + kind);
    const Inputs in = conformance::make_inputs(c, DType::f32);
    const TensorSet outputs = run(c, in);
    const auto value = [&](auto b, auto h, auto, auto ch) {
      return std::optional(in.v.get(b, h, 0, ch));
    };
    EXPECT_EQ(first_difference(outputs.at("o"), 1e-6, value), "") << to_string(c);
    c.problem.op = Op::backward;
    const TensorSet gradients = run(c, in);
    const auto zero = [](auto, auto, auto, auto) { return std::optional(0.0); };
    EXPECT_EQ(first_difference(gradients.at("dq"), 1e-5, zero), "") << to_string(c);
    EXPECT_EQ(first_difference(gradients.at("dk"), 1e-4, zero), "")  // the residues of 70 rows
        << to_string(c);
  }
}

TEST(Properties, ANaNKeyReachesEveryRowThatSeesIt) {
  const std::int64_t at = 70;
  for (const std::string kind : {"lln", "lln:causal", "softmax", "softmax:causal"}) {
    const Case c = make_case("forward:f32:cpu:b1h1n150d24:" + kind);
    Inputs in = conformance::make_inputs(c, DType::f32);
    in.k.set(0, 0, at, 5, std::numeric_limits<double>::quiet_NaN());
    const TensorSet outputs = run(c, in);
    const Tensor& o = outputs.at("o");
    for (std::int64_t n = 0; n < 150; ++n) {
      const bool sees = !c.problem.causal || n >= at;
      for (std::int64_t ch = 0; ch < 24; ++ch) {
        ASSERT_EQ(std::isnan(o.get(0, 0, n, ch)), sees) << "row " << n << " of " << to_string(c);
      }
    }
  }
}

}  // namespace
}  // namespace lln::test
