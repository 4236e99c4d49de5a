// Decoding gives the rows of the causal forward: in any pieces, on every kernel, over a million
// tokens, with difficult values, whatever the threads and the neighbours.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>

#include "attention_run.h"
#include "conformance/compare.h"
#include "conformance/decode.h"
#include "conformance/run.h"

namespace lln::test {
namespace {

using conformance::OwnedState;
using conformance::token_range;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<std::int64_t> random_pieces(std::int64_t tokens, std::uint64_t seed) {
  constexpr std::int64_t kLongest[] = {1, 4, 30, 150};
  std::mt19937_64 random(seed);
  std::vector<std::int64_t> pieces;
  for (std::int64_t left = tokens; left > 0; left -= pieces.back()) {
    const auto longest = static_cast<std::uint64_t>(kLongest[random() % 4]);
    pieces.push_back(std::min(left, static_cast<std::int64_t>(1 + random() % longest)));
  }
  return pieces;
}

// The rows of a case whose tokens are appended in these pieces; single tokens are steps.
Tensor decode(const Case& c, const Inputs& in, const std::vector<std::int64_t>& pieces,
              OwnedState& state, const Exec& exec = {}) {
  Tensor o(c.problem.dtype, in.g.shape());
  std::vector<std::int32_t> lengths;
  std::int64_t begin = 0;
  for (const std::int64_t count : pieces) {
    const AttentionInputs piece = token_range(in.views(), begin, count, lengths);
    const View rows = token_range(o.view(), begin, count);
    if (count == 1) {
      state->step(piece, rows, exec);
    } else {
      state->append(piece, rows, exec);
    }
    begin += count;
  }
  return o;
}

Tensor decode(const Case& c, const Inputs& in, const std::vector<std::int64_t>& pieces,
              const Exec& exec = {}) {
  OwnedState state(conformance::decode_config(c));
  return decode(c, in, pieces, state, exec);
}

Tensor causal_rows(const Case& c, const Inputs& in, const Exec& exec = {}) {
  Tensor o = run(conformance::causal_case(c), in, exec).at("o");
  conformance::zero_rows_past_lengths(in, o);
  return o;
}

// The case table has the f64 reference; here the CPU's own causal forward and random pieces.
TEST(Decode, RandomPiecesGiveTheCausalForward) {
  const char* const problems[] = {
      "append:f32:cpu:b2h4k2n300d20v12:lln", "append:f32:cpu:b1h2n300d16:lln+diag32",
      "append:bf16:cpu:b1h2n300d16:lln+diag48", "append:f16:cpu:b1h2n300d16:lln",
      "append:f32:cpu:b1h3k1n300d7:lln+diag100:feature=elu"};
  for (const char* problem : problems) {
    const Case c = make_case(problem);
    const Inputs in = conformance::make_inputs(c, c.problem.dtype);
    const Tensor expected = causal_rows(c, in);
    const double tolerance = 8 * conformance::unit_roundoff(c.problem.dtype) + 1e-5;
    for (std::uint64_t seed = 0; seed < 12; ++seed) {
      const auto pieces = random_pieces(c.problem.tokens, seed);
      EXPECT_EQ(first_difference(decode(c, in, pieces), tolerance, expected), "")
          << problem << " in pieces of " << fmt::format("{}", fmt::join(pieces, ","));
    }
  }
}

TEST(Decode, RowsOfALongAppendAreTheCausalForward) {
  ThreadPool threads(3);
  for (const char* problem :
       {"append:f32:cpu:b1h2n5000d16:lln", "append:f32:cpu:b1h2n700d16:lln+diag64"}) {
    const Case c = make_case(problem);
    const Inputs in = conformance::make_inputs(c, DType::f32);
    const Tensor found = decode(c, in, {c.problem.tokens}, {.parallel = &threads});
    EXPECT_EQ(first_difference(found, 1e-6, causal_rows(c, in)), "") << problem;
  }
}

TEST(Decode, ReadIsTheRowOfTheLastToken) {
  for (const char* problem :
       {"append:f32:cpu:b2h6k2n131d20v12:lln", "append:f32:cpu:b1h2n128d16:lln+diag32",
        "append:f32:cpu:b1h5k1n97d16:lln+diag32"}) {
    const Case c = make_case(problem);
    const Inputs in = conformance::make_inputs(c, DType::f32);
    OwnedState state(conformance::decode_config(c));
    const Tensor rows = decode(c, in, {c.problem.tokens - 1, 1}, state);
    std::vector<std::int32_t> lengths;
    const std::int64_t last = c.problem.tokens - 1;
    AttentionInputs query = token_range(in.views(), last, 1, lengths);
    query.k = query.v = query.beta = {};
    Tensor o(DType::f32, {c.problem.batch, c.problem.heads, 1, c.problem.dim_v});
    state->read(query, o.view());
    EXPECT_EQ(first_difference(o, 1e-6,
                               [&](auto b, auto h, auto, auto channel) {
                                 return std::optional(rows.get(b, h, last, channel));
                               }),
              "")
        << problem;
    EXPECT_EQ(state->tokens(), c.problem.tokens);
  }
}

// Many rows of one read are what the same rows give one by one, and the state stays as it is.
TEST(Decode, ReadOfManyRowsChangesNothing) {
  const Case c = make_case("append:f32:cpu:b2h6k2n50d20v12:lln+diag16");
  const Inputs in = conformance::make_inputs(c, DType::f32);
  OwnedState state(conformance::decode_config(c));
  decode(c, in, {50}, state);
  const std::vector<std::byte> before(state.memory().begin(), state.memory().end());
  AttentionInputs query = in.views();
  query.k = query.v = {};
  Tensor together(DType::f32, in.g.shape());
  state->read(query, together.view());
  Tensor alone(DType::f32, in.g.shape());
  std::vector<std::int32_t> lengths;
  for (std::int64_t i = 0; i < 50; ++i) {
    state->read(token_range(query, i, 1, lengths), token_range(alone.view(), i, 1));
  }
  EXPECT_EQ(together.bytes(), alone.bytes());
  EXPECT_TRUE(std::equal(before.begin(), before.end(), state.memory().begin()));
}

TEST(Decode, EmptySequencesGiveZeroRows) {
  const Case c = make_case("append:f32:cpu:b2h2n3d8:lln+diag16");
  const Inputs in = conformance::make_inputs(c, DType::f32);
  OwnedState state(conformance::decode_config(c));
  AttentionInputs query = in.views();
  query.k = query.v = {};
  Tensor o(DType::f32, in.g.shape());
  state->read(query, o.view());
  EXPECT_EQ(first_difference(o, 0, [](auto...) { return std::optional(0.0); }), "");
  const std::vector<std::int32_t> lengths = {0, 3};
  AttentionInputs append = in.views();
  append.key_lengths = IndexView(std::span(lengths));
  state->append(append, o.view());
  EXPECT_EQ(state->tokens(0), 0);
  EXPECT_EQ(state->tokens(1), 3);
  EXPECT_EQ(first_difference(
                o, 0, [](auto b, auto...) { return b == 0 ? std::optional(0.0) : std::nullopt; }),
            "");
}

// Without rows the same sums arise.
TEST(Decode, AppendWithoutRowsLeavesTheSameState) {
  ThreadPool threads(2);
  for (Parallel* parallel : {static_cast<Parallel*>(nullptr), static_cast<Parallel*>(&threads)}) {
    const Case c = make_case("append:bf16:cpu:b2h4k2n2500d16:lln+diag48");
    const Inputs in = conformance::make_inputs(c, DType::bf16);
    OwnedState with_rows(conformance::decode_config(c));
    decode(c, in, {5, 2495}, with_rows, {.parallel = parallel});
    OwnedState without(conformance::decode_config(c));
    std::vector<std::int32_t> lengths;
    for (const auto& [begin, count] : {std::pair{0, 5}, std::pair{5, 2495}}) {
      AttentionInputs keys = token_range(in.views(), begin, count, lengths);
      keys.q = keys.alpha = {};
      without->append(keys, {}, {.parallel = parallel});
    }
    EXPECT_TRUE(
        std::equal(with_rows.memory().begin(), with_rows.memory().end(), without.memory().begin()));
  }
}

TEST(Decode, ThreadsAndNeighboursChangeNoBit) {
  const Case c = make_case("append:f32:cpu:b3h4k2n2300d16:lln+diag32");
  const Inputs in = conformance::make_inputs(c, DType::f32);
  const std::vector<std::int64_t> pieces = {1, 2, 70, 1, 2226};
  OwnedState one(conformance::decode_config(c));
  const Tensor expected = decode(c, in, pieces, one);
  for (const int threads : {2, 5}) {
    ThreadPool pool(threads);
    OwnedState state(conformance::decode_config(c));
    const Tensor found = decode(c, in, pieces, state, {.parallel = &pool});
    EXPECT_EQ(found.bytes(), expected.bytes()) << threads << " threads";
    EXPECT_TRUE(std::equal(one.memory().begin(), one.memory().end(), state.memory().begin()))
        << threads << " threads";
  }
  // Sequence 1 alone.
  Case alone = c;
  alone.problem.batch = alone.problem.sequences = 1;
  Inputs single = conformance::make_inputs(alone, DType::f32);
  for (auto [to, from] : {std::pair{&single.q, &in.q}, {&single.k, &in.k}, {&single.v, &in.v}}) {
    to->for_each([&](auto, auto h, auto n, auto l) { to->set(0, h, n, l, from->get(1, h, n, l)); });
  }
  EXPECT_EQ(first_difference(decode(alone, single, pieces), 0,
                             [&](auto, auto h, auto n, auto l) {
                               return std::optional(expected.get(1, h, n, l));
                             }),
            "");
}

TEST(Decode, NonFiniteValuesStayInTheirSequenceAndHead) {
  for (const char* kind : {"lln", "lln+diag16"}) {
    for (const std::vector<std::int64_t>& pieces :
         {std::vector<std::int64_t>(40, 1), std::vector<std::int64_t>{40}}) {
      for (const float value : {kInfinity, -kInfinity, std::nanf("")}) {
        for (const bool key : {true, false}) {
          const Case c = make_case(fmt::format("append:f32:cpu:b2h4k2n40d8:{}", kind));
          Inputs in = conformance::make_inputs(c, DType::f32);
          const Tensor expected = decode(c, in, pieces);
          (key ? in.k : in.v).set(1, 1, 20, 3, value);
          const Tensor found = decode(c, in, pieces);
          // Rows before it in its own head may be summed in another order.
          for (const bool own : {false, true}) {
            EXPECT_EQ(first_difference(found, own ? 1e-5 : 0,
                                       [&](auto b, auto h, auto n, auto l) {
                                         const bool here = b == 1 && h >= 2;
                                         return here != own || (here && n >= 20)
                                                    ? std::nullopt
                                                    : std::optional(expected.get(b, h, n, l));
                                       }),
                      "")
                << kind << (key ? " key " : " value ") << value;
          }
          EXPECT_TRUE(key || !std::isfinite(found.get(1, 2, 39, 3)));
        }
      }
    }
  }
}

// Values of both signs near the limit: the average of them is finite.
TEST(Decode, LargestValuesDoNotOverflow) {
  const Case c = make_case("append:f32:cpu:b1h1n64d8:lln");
  Inputs in = conformance::make_inputs(c, DType::f32);
  in.v.for_each([&](auto b, auto h, auto n, auto l) {
    in.v.set(b, h, n, l, (n % 2 == 0 ? 1 : -1) * 3.3e38);
  });
  for (const std::vector<std::int64_t>& pieces :
       {std::vector<std::int64_t>(64, 1), std::vector<std::int64_t>{64},
        std::vector<std::int64_t>{30, 1, 33}}) {
    const Tensor o = decode(c, in, pieces);
    EXPECT_EQ(first_difference(o, 3.4e38, [](auto...) { return std::optional(0.0); }), "");
  }
}

// One head over a million tokens against sums in f64: the mass, and with it every later average.
struct LongRun {
  float mean;          // of the keys
  std::int64_t piece;  // tokens added at once
};

class MillionTokens : public testing::TestWithParam<LongRun> {};

TEST_P(MillionTokens, MassAndAverageStayRight) {
#ifdef LLN_QUICK_TESTS
  constexpr std::int64_t kTokens = 20'000;
#else
  constexpr std::int64_t kTokens = 1'000'000;
#endif
  constexpr std::int64_t kDim = 4;
  const auto [mean, piece] = GetParam();
  OwnedState state({.dim = kDim, .dim_v = 2});
  const float scale = 3;  // weights over many orders of magnitude: the small ones must not get lost
  std::vector<float> noise(100003);
  for (std::size_t i = 0; i < noise.size(); ++i) {
    noise[i] = static_cast<float>(conformance::normal_number(3, i));
  }
  std::vector<float> q(piece * kDim, 0.0F), k(piece * kDim), v(piece * 2, 1.0F), o(piece * 2);
  const AttentionInputs in{.q = view(q.data(), {1, 1, piece, kDim}),
                           .k = view(k.data(), {1, 1, piece, kDim}),
                           .v = view(v.data(), {1, 1, piece, 2}),
                           .alpha = scalar(&scale),
                           .beta = scalar(&scale)};
  const View out = view(o.data(), {1, 1, piece, 2});
  std::vector<std::byte> workspace(1 << 20);
  double mass[kDim] = {}, sum[kDim] = {};
  for (std::int64_t t = 0; t < kTokens; t += piece) {
    for (std::int64_t i = 0; i < piece; ++i) {
      for (std::int64_t l = 0; l < kDim; ++l) {
        float& key = k[i * kDim + l];
        key = mean + noise[((t + i) * kDim + l) % noise.size()];
        const double e = std::exp(double{scale} * (double{key} - mean));
        mass[l] += e;
        sum[l] += e * static_cast<double>((t + i) % 3);
      }
      v[i * 2 + 1] = static_cast<float>((t + i) % 3);
    }
    state->append(in, out, {.workspace = workspace});
  }
  double total = 0, expected = 0;
  for (std::int64_t l = 0; l < kDim; ++l) {
    total += mass[l];
    expected += sum[l];
  }
  EXPECT_NEAR(o[piece * 2 - 2], 1, 1e-4);
  EXPECT_NEAR(o[piece * 2 - 1], expected / total, 1e-4);
  // A key as heavy as all before it together, in every channel, takes half of every average.
  std::vector<std::int32_t> lengths;
  for (std::int64_t l = 0; l < kDim; ++l) {
    k[l] = mean + static_cast<float>(std::log(mass[l]) / scale);
  }
  v[0] = 3;
  state->step(token_range(in, 0, 1, lengths), token_range(out, 0, 1));
  EXPECT_NEAR(o[0], 2, 1e-4);
}

INSTANTIATE_TEST_SUITE_P(Runs, MillionTokens,
                         testing::Values(LongRun{0, 1}, LongRun{100, 1}, LongRun{-100, 1},
                                         LongRun{100, 20}));

// Every kernel in the lists decodes; the case table compares them with the reference.
TEST(Decode, KernelsCanBeForced) {
  const Case c = make_case("append:f32:cpu:b1h2n40d16:lln");
  const Inputs in = conformance::make_inputs(c, DType::f32);
  const Tensor expected = causal_rows(c, in);
  EXPECT_EQ(kernel_names(Op::append, DeviceKind::cpu), kernel_names(Op::step, DeviceKind::cpu));
  int taken = 0;
  for (const auto& candidate : explain(c.problem).candidates) {
    if (!candidate.refusal.empty()) continue;
    ++taken;
    const Tensor found = decode(c, in, {20, 1, 1, 18}, {.kernel = candidate.kernel});
    EXPECT_EQ(first_difference(found, 1e-5, expected), "") << candidate.kernel;
  }
  EXPECT_GT(taken, 0);
}

}  // namespace
}  // namespace lln::test
