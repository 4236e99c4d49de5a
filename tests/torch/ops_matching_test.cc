// Matching, moments, calibration and the instruments on tensors, against plain torch and the core.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "expect_error.h"
#include "lln_torch/ops/attention.h"
#include "lln_torch/ops/calibration.h"
#include "lln_torch/ops/instruments.h"
#include "lln_torch/ops/matching.h"

namespace lln_torch {
namespace {

using lln::test::expect_error;

void expect_equal(const at::Tensor& found, const at::Tensor& expected, double tolerance) {
  ASSERT_EQ(found.sizes(), expected.sizes());
  EXPECT_LE((found - expected).abs().max().item<double>(), tolerance);
}

TEST(HeadMoments, AreThoseOfTheTokensThatCount) {
  const at::Tensor x = at::randn({2, 3, 50, 16}, at::kDouble) + 0.5;
  const HeadMoments all = head_moments(x);
  expect_equal(all.mean, x.flatten(2).mean(-1), 1e-13);
  expect_equal(all.variance, x.flatten(2).var(-1), 1e-12);
  const at::Tensor lengths = at::tensor({50L, 20L});
  const at::Tensor mask = at::arange(50).unsqueeze(0) < lengths.unsqueeze(1);
  const HeadMoments by_mask = head_moments(x, {.mask = mask, .lengths = {}, .cu_seqlens = {}});
  const HeadMoments by_length = head_moments(x, {.mask = {}, .lengths = lengths, .cu_seqlens = {}});
  expect_equal(by_mask.mean[1], x[1].slice(1, 0, 20).flatten(1).mean(-1), 1e-13);
  expect_equal(by_length.variance[1], x[1].slice(1, 0, 20).flatten(1).var(-1), 1e-12);
  EXPECT_TRUE(at::equal(by_mask.count, by_length.count));
  const HeadMoments none = head_moments(x.slice(2, 0, 0));
  EXPECT_EQ(none.variance.abs().max().item<double>(), 0);
}

// st of docs/matching.md with constants of the line for this dim.
TEST(MatchMoments, FollowsTheFormula) {
  const at::Tensor q = at::randn({2, 4, 256, 32}, at::kDouble) * 1.5;
  const at::Tensor k = at::randn({2, 2, 256, 32}, at::kDouble);
  const auto [alpha, beta] = match_moments(q, k);
  ASSERT_EQ(alpha.sizes(), (std::vector<std::int64_t>{2, 4}));
  ASSERT_EQ(beta.sizes(), (std::vector<std::int64_t>{2, 2}));
  const lln::MatchingConstants c = lln::matching_constants(32);
  const at::Tensor variance_q =
      q.reshape({2, 2, -1}).var(-1);  // of the heads that share a key head
  const at::Tensor variance_k = k.reshape({2, 2, -1}).var(-1);
  const at::Tensor st = at::sqrt((variance_q * variance_k - c.b) / (2 * c.a));
  expect_equal(alpha, (st / variance_q.sqrt()).repeat_interleave(2, 1), 1e-9);
  expect_equal(beta, st / variance_k.sqrt(), 1e-9);
  EXPECT_EQ(match_moments(q.to(at::kFloat), k.to(at::kFloat)).first.scalar_type(), at::kFloat);
  expect_error([&] { match_moments(q, k, {.mode = "exact", .tokens = {}, .causal = true}); },
               {"mode exact reads the whole sequence"});
}

TEST(RunningMoments, AreThoseOfTheStepsBefore) {
  const at::Tensor q = at::randn({2, 4, 64, 32});
  const at::Tensor k = at::randn({2, 2, 64, 32});
  const at::Tensor running = new_running_moments(2);
  const auto scales = [&] {
    MatchCall call;
    call.mode = "ema";
    call.running = running;
    return match_moments(q, k, call);
  };
  EXPECT_TRUE(at::equal(scales().first, at::ones({2, 4})));  // before the first step
  update_moments(running, q, k, {}, 0.9);
  expect_equal(running.select(2, 0), at::full({2, 2}, 0.1, at::kDouble), 1e-12);
  const at::Tensor all_q = q.transpose(0, 1).reshape({2, -1}).to(at::kDouble);
  expect_equal(running[0].select(1, 2), all_q.var(-1), 1e-2);
  const at::Tensor alpha = scales().first;
  EXPECT_TRUE(at::equal(alpha[0], alpha[1]));
  EXPECT_FALSE(at::equal(alpha, at::ones({2, 4})));
  expect_error(
      [&] {
        update_moments(at::zeros({2, 3, 3}), q, k);
      },
      {"running must be float64 [2, heads of k, 3]"});
}

TEST(LayerCalibration, InPiecesIsThatOfAllData) {
  const at::Tensor q = at::randn({6, 4, 40, 32});
  const at::Tensor k = at::randn({6, 2, 40, 32}) * 1.25;
  const at::Tensor mask = at::arange(40).unsqueeze(0) < at::arange(35, 41).unsqueeze(1);
  LayerCalibration pieces, whole;
  for (std::int64_t b = 0; b < 6; b += 2) {
    TokenChoice tokens;
    tokens.key_mask = mask.slice(0, b, b + 2);
    pieces.take(q.slice(0, b, b + 2), k.slice(0, b, b + 2), tokens);
  }
  TokenChoice tokens;
  tokens.key_lengths = at::arange(35, 41);
  whole.take(q, k, tokens);
  for (const char* mode : {"paper", "per_head", "exact", "entropy"}) {
    const lln::CalibratedLayer found = pieces.layer("encoder.0", mode);
    const auto [alpha, beta] = scale_tensors(found);
    const auto [alpha_whole, beta_whole] = scale_tensors(whole.layer("", mode));
    expect_equal(alpha, alpha_whole, 1e-6);
    expect_equal(beta, beta_whole, 1e-6);
    EXPECT_EQ(found.name, "encoder.0");
    EXPECT_DOUBLE_EQ(found.tokens, 37.5);
    // The moments of a head are taken over all sequences together, as the core does.
    const at::Tensor lengths = at::arange(35, 41);
    const at::Tensor lone_q = q.contiguous(), lone_k = k.contiguous();
    const auto view = [](const at::Tensor& x) {
      const lln::Shape shape{x.size(0), x.size(1), x.size(2), x.size(3)};
      return lln::ConstView(
          lln::View{x.data_ptr(), lln::DType::f32, {}, shape, lln::contiguous_stride(shape)});
    };
    const lln::CalibratedLayer core = lln::calibrate(
        lln::MatchingInputs{.q = view(lone_q),
                            .k = view(lone_k),
                            .key_lengths = std::span(lengths.const_data_ptr<std::int64_t>(), 6)},
        lln::parse_matching(mode));
    for (std::size_t h = 0; h < 4; ++h) EXPECT_NEAR(found.alpha[h], core.alpha[h], 1e-6);
  }
  expect_error([&] { pieces.take(q.slice(1, 0, 2), k); }, {"q has 2 heads", "expected 4 and 2"});
  expect_error([&] { LayerCalibration().layer("", "entropy"); }, {"0 moments of q"});
  expect_error([&] { pieces.layer("", "ema"); }, {"mode ema"});
}

TEST(Analyze, GivesWhatTheProgramPrints) {
  const at::Tensor q = at::randn({2, 2, 64, 16});
  const at::Tensor k = at::randn({2, 2, 64, 16});
  AnalyzeCall call;
  call.layer = 3;
  call.name = "encoder.3";
  const nlohmann::json found = nlohmann::json::parse(analyze(q, k, call));
  ASSERT_EQ(found.size(), 4U);  // two heads, two kinds
  for (const auto& head : found) {
    EXPECT_EQ(head.at("layer"), 3);
    const double entropy = head.at("entropy_bits").get<double>();
    EXPECT_GT(entropy, 0);
    EXPECT_LE(entropy, std::log2(64.0) + 1e-9);
  }
  EXPECT_EQ(found[0].at("kind"), "softmax");
  EXPECT_EQ(found[1].at("kind"), "lln");
  // Scales that are given are those that are used, and f64 tensors are taken.
  call.alpha = at::full({2}, 1.5);
  call.beta = at::full({2}, 2.5);
  call.kinds = {"lln"};
  call.brief = true;
  const nlohmann::json given =
      nlohmann::json::parse(analyze(q.to(at::kDouble), k.to(at::kDouble), call));
  EXPECT_EQ(given[0].at("matching"), "frozen");
  EXPECT_DOUBLE_EQ(given[0].at("alpha").get<double>(), 1.5);
  EXPECT_LT(given[0].size(), found[1].size());
  call.kinds = {"lnn"};
  expect_error([&] { analyze(q, k, call); }, {"lnn"});
}

}  // namespace
}  // namespace lln_torch
