// The modes that follow tables: the form of the tables, interpolation, limits and what is said of
// them, what is reached through the library's own kernels, and calibration. lln fit --verify holds
// many more heads against the promises (tests/cli).
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <vector>

#include "api/matching_rule.h"
#include "conformance/data.h"
#include "expect_error.h"
#include "lln/lln.h"

namespace lln {
namespace {

using conformance::Tensor;

constexpr std::array kTableModes = {Matching::exact, Matching::entropy};

Tensor normal_tensor(std::uint64_t seed, const Shape& shape, double sigma = 1) {
  Tensor x(DType::f32, shape);
  std::uint64_t index = 0;
  x.for_each([&](auto b, auto h, auto n, auto c) {
    x.set(b, h, n, c, sigma * conformance::normal_number(seed, index++));
  });
  return x;
}

struct Matched {
  Tensor alpha, beta;
  MatchingReport report;
};

Matched match(const MatchingInputs& in, const MatchingOptions& options) {
  Matched m{Tensor(DType::f32, {in.q.shape[0], in.q.shape[1], 1, 1}),
            Tensor(DType::f32, {in.q.shape[0], in.k.shape[1], 1, 1}),
            {}};
  m.report = match_moments(in, {m.alpha.view(), m.beta.view()}, options);
  return m;
}

double share(Matching mode, std::int64_t dim, double tokens, double target) {
  return share_by_table(matching_rule({.mode = mode}, dim), target, tokens).st;
}

TEST(MatchingTables, RiseWithTheTargetWithoutJumps) {
  for (const Matching mode : kTableModes) {
    for (const std::int64_t dim : {8, 11, 16, 48, 64, 100, 256}) {
      const MatchingRule rule = matching_rule({.mode = mode}, dim);
      for (const double tokens : {16.0, 50.0, 256.0, 1000.0, 65536.0}) {
        double before = share_by_table(rule, 1.0 / 64, tokens).st;
        for (double target = 1.01 / 64; target < 16; target *= 1.01) {
          const double here = share_by_table(rule, target, tokens).st;
          // Never steeper than the square root, which it is where st is small.
          ASSERT_GT(here, before) << dim << " " << tokens << " " << target;
          ASSERT_LT(here, before * 1.0075) << dim << " " << tokens << " " << target;
          before = here;
        }
      }
    }
  }
}

TEST(MatchingTables, ChangeSlowlyWithDimAndTokens) {
  for (const Matching mode : kTableModes) {
    for (const double target : {0.02, 0.3, 1.0, 4.0, 15.0}) {
      for (std::int64_t dim = 9; dim <= 256; ++dim) {
        const double ratio = share(mode, dim, 512, target) / share(mode, dim - 1, 512, target);
        EXPECT_GT(ratio, 1) << dim << " " << target;  // more channels: sums vary less
        EXPECT_LT(ratio, 1.07) << dim << " " << target;
      }
      for (double tokens = 16; tokens < 60000; tokens *= 1.1) {
        const double ratio =
            share(mode, 64, tokens * 1.1, target) / share(mode, 64, tokens, target);
        EXPECT_NEAR(ratio, 1, 0.02) << tokens << " " << target;
      }
    }
  }
}

// Equal variance over-concentrates rows: equal entropy needs a smaller scale, the more the less
// the target is small.
TEST(MatchingTables, EntropyStaysBelowExact) {
  for (const std::int64_t dim : {16, 64, 256}) {
    for (const double target : {0.5, 1.0, 4.0}) {
      EXPECT_LT(share(Matching::entropy, dim, 1024, target),
                0.97 * share(Matching::exact, dim, 1024, target));
    }
  }
  // Published for D = 64, N = 512, sigma = 1: log-variance 1 where the line gives .88 at 2.15.
  EXPECT_NEAR(share(Matching::exact, 64, 512, 1), 2.25, 0.08);
}

TEST(MatchingTables, WhatIsOutsideCountsAsTheNearestAndIsReported) {
  const auto flags = [](std::int64_t dim, std::int64_t tokens, double sigma) {
    const Tensor q = normal_tensor(1, {1, 1, tokens, dim}, sigma);
    const Tensor k = normal_tensor(2, {1, 1, tokens, dim}, sigma);
    const Matched m = match({.q = q.view(), .k = k.view()}, {.mode = Matching::entropy});
    EXPECT_TRUE(std::isfinite(m.alpha.get(0, 0, 0, 0)));
    std::string text;
    for (const ClampedHead& c : m.report.clamped) {
      EXPECT_FALSE(c.sigma_q || c.sigma_k);
      text += c.target ? "target " : "";
      text += c.size ? "size " : "";
    }
    return text;
  };
  EXPECT_EQ(flags(64, 100, 1), "");
  EXPECT_EQ(flags(64, 100, 0.2), "target ");
  EXPECT_EQ(flags(64, 100, 3), "target ");
  EXPECT_EQ(flags(64, 10, 1), "size ");
  EXPECT_EQ(flags(4, 100, 1), "size ");
  EXPECT_EQ(flags(7, 10, 5), "target size ");

  for (const Matching mode : kTableModes) {
    EXPECT_EQ(share(mode, 3, 100, 1), share(mode, 8, 100, 1));
    EXPECT_EQ(share(mode, 1000, 100, 1), share(mode, 256, 100, 1));
    EXPECT_EQ(share(mode, 64, 1, 1), share(mode, 64, 16, 1));
    EXPECT_EQ(share(mode, 64, 1e9, 1), share(mode, 64, 65536, 1));
    EXPECT_EQ(share(mode, 64, 100, 0), share(mode, 64, 100, 1.0 / 64));
    EXPECT_EQ(share(mode, 64, 100, 1e9), share(mode, 64, 100, 16));
  }
  const Tensor flat(DType::f32, {1, 1, 0, 8});
  const Matched none = match({.q = flat.view(), .k = flat.view()}, {.mode = Matching::exact});
  EXPECT_EQ(none.alpha.get(0, 0, 0, 0), 1);
  EXPECT_TRUE(none.report.clamped.empty());
  EXPECT_EQ(none.report.constants, MatchingConstants());
}

// The number of tokens is each sequence's own, and padding is none of them.
TEST(MatchingTables, TokensAreThoseThatCount) {
  const Tensor q = normal_tensor(3, {2, 4, 200, 16}), k = normal_tensor(4, {2, 2, 200, 16});
  const std::vector<std::int32_t> lengths = {200, 40};
  const MatchingOptions options{.mode = Matching::entropy};
  const Matched padded =
      match({.q = q.view(), .k = k.view(), .key_lengths = IndexView(std::span(lengths))}, options);
  ConstView short_q = q.view(), short_k = k.view();
  for (ConstView* x : {&short_q, &short_k}) {
    x->data = static_cast<const float*>(x->data) + x->stride[0];
    x->shape[0] = 1;
    x->shape[2] = 40;
  }
  const Matched alone = match({.q = short_q, .k = short_k}, options);
  for (std::int64_t h = 0; h < 4; ++h) {
    EXPECT_EQ(padded.alpha.get(1, h, 0, 0), alone.alpha.get(0, h, 0, 0));
    EXPECT_EQ(padded.beta.get(1, h / 2, 0, 0), alone.beta.get(0, h / 2, 0, 0));
  }
}

// ln P over all entries and the mean entropy of rows; v is a piece of the identity, so that o is P.
struct Measured {
  double log_variance = 0, entropy = 0;
};

Measured measured(const Tensor& q, const Tensor& k, const ConstView& alpha, const ConstView& beta,
                  Kind kind) {
  const std::int64_t tokens = q.shape()[2], columns = 256;
  Moments logs;
  double entropy = 0;
  for (std::int64_t key = 0; key < tokens; key += columns) {
    const Shape shape = {1, 1, tokens, columns};
    Tensor v(DType::f32, shape), p(DType::f32, shape);
    v.for_each([&](auto b, auto h, auto n, auto c) { v.set(b, h, n, c, n == key + c ? 1 : 0); });
    attention_forward({.q = q.view(), .k = k.view(), .v = v.view(), .alpha = alpha, .beta = beta},
                      {.o = p.view()}, {.kind = kind});
    p.for_each([&](auto b, auto h, auto n, auto c) {
      const double weight = p.get(b, h, n, c);
      logs = merge(logs, {1, std::log(weight), 0});
      entropy -= weight * std::log(weight) / static_cast<double>(tokens);
    });
  }
  return {logs.variance(), entropy};
}

// One head of 512 tokens scatters by 4% in Var(ln P) and by 0.02 nats; the mean of four by half.
TEST(MatchingTables, TheKernelsReachWhatIsPromised) {
  for (const std::int64_t dim : {16, 64}) {
    double exact = 0, entropy = 0, per_head = 0;
    for (std::uint64_t seed = 0; seed < 4; ++seed) {
      const Tensor q = normal_tensor(2 * seed + 50, {1, 1, 512, dim});
      const Tensor k = normal_tensor(2 * seed + 51, {1, 1, 512, dim});
      const auto reached = [&](Matching mode) {
        const Matched m = match({.q = q.view(), .k = k.view()}, {.mode = mode});
        EXPECT_TRUE(m.report.clamped.empty());
        return measured(q, k, m.alpha.view(), m.beta.view(), Kind::lln);
      };
      const double softmax = measured(q, k, {}, {}, Kind::softmax).entropy;
      exact += reached(Matching::exact).log_variance / 4;
      entropy += (reached(Matching::entropy).entropy - softmax) / 4;
      per_head += (reached(Matching::per_head).entropy - softmax) / 4;
    }
    EXPECT_NEAR(exact, 1, 0.05) << dim;
    EXPECT_NEAR(entropy, 0, 0.035) << dim;
    EXPECT_LT(per_head, -0.15) << dim;  // what equal variance costs in entropy
  }
}

TEST(Calibrate, PoolsTheSequencesOfALayer) {
  const Tensor q = normal_tensor(5, {3, 4, 300, 32}, 0.8), k = normal_tensor(6, {3, 2, 300, 32});
  std::vector<ClampedHead> clamped;
  const MatchingInputs in{.q = q.view(), .k = k.view()};
  const CalibratedLayer layer = calibrate(in, Matching::entropy, &clamped);
  EXPECT_TRUE(clamped.empty());
  EXPECT_EQ(layer.dim, 32);
  EXPECT_EQ(layer.tokens, 300);
  ASSERT_EQ(layer.alpha.size(), 4U);
  ASSERT_EQ(layer.beta.size(), 2U);
  EXPECT_EQ(layer.alpha[0], layer.alpha[1]);
  EXPECT_NE(layer.alpha[1], layer.alpha[2]);
  const Matched each = match(in, {.mode = Matching::entropy});
  double mean = 0;
  for (std::int64_t b = 0; b < 3; ++b) mean += each.alpha.get(b, 3, 0, 0) / 3;
  EXPECT_NEAR(layer.alpha[3], mean, 0.01 * mean);

  // Of one sequence it is match_moments, in every mode.
  const Tensor q1 = normal_tensor(7, {1, 4, 300, 32}), k1 = normal_tensor(8, {1, 2, 300, 32});
  for (const Matching mode :
       {Matching::paper, Matching::per_head, Matching::exact, Matching::entropy}) {
    const MatchingInputs one{.q = q1.view(), .k = k1.view()};
    const CalibratedLayer found = calibrate(one, mode);
    const Matched matched = match(one, {.mode = mode});
    for (std::int64_t h = 0; h < 4; ++h) {
      EXPECT_EQ(found.alpha[static_cast<std::size_t>(h)], matched.alpha.get(0, h, 0, 0));
    }
    EXPECT_EQ(found.beta[1], matched.beta.get(0, 1, 0, 0));
  }
}

TEST(Calibrate, FromMomentsOfBatches) {
  const Tensor q = normal_tensor(13, {5, 4, 90, 16}, 0.7), k = normal_tensor(14, {5, 2, 90, 16});
  const std::vector<std::int32_t> lengths = {90, 31, 0, 7, 64};
  const MatchingInputs all{
      .q = q.view(), .k = k.view(), .key_lengths = IndexView(std::span(lengths))};
  PooledMoments pooled{.heads = 4, .dim = 16};
  pooled.q.resize(2);
  pooled.k.resize(2);
  std::vector<Moments> of_q(5 * 4), of_k(5 * 2);
  head_moments({.x = q.view(), .lengths = all.key_lengths}, of_q);
  head_moments({.x = k.view(), .lengths = all.key_lengths}, of_k);
  for (std::size_t s = 0; s < 5; ++s) {
    for (std::size_t h = 0; h < 4; ++h) {
      pooled.q[h / 2] = merge(pooled.q[h / 2], of_q[s * 4 + h]);
    }
    for (std::size_t h = 0; h < 2; ++h) pooled.k[h] = merge(pooled.k[h], of_k[s * 2 + h]);
    if (of_k[s * 2].count > 0) ++pooled.sequences;
  }
  for (const Matching mode :
       {Matching::paper, Matching::per_head, Matching::exact, Matching::entropy}) {
    const CalibratedLayer expected = calibrate(all, mode), found = calibrate(pooled, mode);
    EXPECT_EQ(found.dim, expected.dim);
    EXPECT_EQ(found.tokens, expected.tokens);
    for (std::size_t h = 0; h < 4; ++h) EXPECT_FLOAT_EQ(found.alpha[h], expected.alpha[h]);
    for (std::size_t h = 0; h < 2; ++h) EXPECT_FLOAT_EQ(found.beta[h], expected.beta[h]);
  }
  EXPECT_NE(calibrate(pooled, Matching::entropy).beta[0],
            calibrate(pooled, Matching::entropy).beta[1]);
}

TEST(Calibrate, PaddingAndLimits) {
  const Tensor q = normal_tensor(9, {2, 1, 40, 8}), k = normal_tensor(10, {2, 1, 40, 8}, 5);
  const std::vector<std::int32_t> lengths = {40, 10};
  std::vector<ClampedHead> clamped;
  const CalibratedLayer layer =
      calibrate({.q = q.view(), .k = k.view(), .key_lengths = IndexView(std::span(lengths))},
                Matching::exact, &clamped);
  EXPECT_EQ(layer.tokens, 25);
  ASSERT_EQ(clamped.size(), 1U);
  EXPECT_TRUE(clamped[0].target && !clamped[0].size);
  EXPECT_EQ(clamped[0].sequence, -1);
  EXPECT_EQ(clamped[0].head_k, 0);
}

TEST(Calibrate, Refusals) {
  const Tensor q = normal_tensor(11, {1, 2, 5, 8}), k = normal_tensor(12, {1, 2, 5, 8});
  test::expect_error([&] { calibrate({.q = q.view(), .k = k.view()}, Matching::ema); },
                     {"calibrate: 1 fault in mode ema for forward:f32:cpu:b1h2n5d8:lln",
                      "mode ema finds no scales: expected paper, per_head, exact or entropy"});
  const std::vector<std::int32_t> none = {0};
  test::expect_error(
      [&] {
        calibrate({.q = q.view(), .k = k.view(), .key_lengths = IndexView(std::span(none))},
                  Matching::entropy);
      },
      {"calibrate: no token of forward:f32:cpu:b1h2n5d8:lln"});
  test::expect_error(
      [&] {
        calibrate(PooledMoments{.heads = 3, .q = {{1, 0, 0}, {}}, .k = {{1, 0, 1}, {1, 0, 1}}},
                  Matching::none);
      },
      {"calibrate: 4 faults in pooled moments", "mode none finds no scales",
       "heads is 3: expected a positive multiple of the 2 key heads",
       "dim is 0, sequences is 0: expected both positive",
       "q of key head 1 has count 0, mean 0, m2 0"});
}

}  // namespace
}  // namespace lln
