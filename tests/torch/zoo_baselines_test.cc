// Softmax, quadratic, linear, performer, cosformer, kvt and local against their formulas on N x N
// weights, and what is special to each.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include <algorithm>
#include <numbers>

#include "torch/zoo_cases.h"

namespace lln_torch {
namespace {

using testing::HasSubstr;
using zoo_cases::config_of;
using zoo_cases::error_of;
using zoo_cases::expect_definition;
using zoo_cases::expect_near;
using zoo_cases::largest_difference;
using zoo_cases::made;
using zoo_cases::random_tokens;
using zoo_cases::run;
using zoo_cases::slow_average;
using zoo_cases::slow_scores;
using zoo_cases::slow_softmax;
using zoo_cases::slow_visible;
using zoo_cases::SlowInputs;

TEST(ZooSoftmax, IsTheFormula) {
  for (const bool causal : {false, true}) {
    expect_definition(config_of("softmax", causal), "", [&](const SlowInputs& in) {
      return slow_softmax(slow_scores(in), slow_visible(in, causal), in);
    });
  }
}

TEST(ZooSoftmax, TemperatureDividesTheScores) {
  for (const bool causal : {false, true}) {
    expect_definition(config_of("softmax", causal), "temperature = 0.4", [&](const SlowInputs& in) {
      return slow_softmax(slow_scores(in) / 0.4, slow_visible(in, causal), in);
    });
  }
}

// What the instruments see must have the same scores, of which they know sqrt D alone.
TEST(ZooSoftmax, ObserversSeeTheTemperature) {
  struct Last : Observer {
    void observe(const Observation& observation) override { seen = observation; }
    Observation seen;
  } warm, plain;
  const Tensor x = random_tokens(2, 37, 24);
  Context with{.observer = &warm}, without{.observer = &plain};
  made(config_of("softmax"), "temperature = 0.5")->forward(x, {}, with);
  made(config_of("softmax"))->forward(x, {}, without);
  EXPECT_TRUE(at::allclose(warm.seen.q, 2 * plain.seen.q));
  EXPECT_TRUE(at::equal(warm.seen.k, plain.seen.k));
}

Tensor slow_quadratic(const SlowInputs& in, bool causal) {
  return slow_average(slow_scores(in).square(), slow_visible(in, causal), in);
}

TEST(ZooQuadratic, IsTheFormula) {
  for (const bool causal : {false, true}) {
    expect_definition(
        config_of("quadratic", causal), "",
        [&](const SlowInputs& in) { return slow_quadratic(in, causal); }, 1e-8);
  }
}

// Beyond 1024 tokens the weights are never written out.
TEST(ZooQuadratic, LongSequencesAreTheFormula) {
  for (const bool causal : {false, true}) {
    AttentionConfig config = config_of("quadratic", causal);
    config.dim = 4;
    config.heads = 1;
    config.max_tokens = 1100;
    expect_definition(
        config, "", 1100, {1100, 1030},
        [&](const SlowInputs& in) { return slow_quadratic(in, causal); }, 1e-8);
  }
}

Tensor slow_transnormer(const SlowInputs& in, bool causal) {
  const Tensor seen = slow_visible(in, causal);
  const Tensor scores = slow_scores(in);
  const Tensor weights = at::where(seen, scores, at::zeros_like(scores));
  const Tensor v = at::where(in.mask.unsqueeze(1).unsqueeze(-1), in.v, at::zeros_like(in.v));
  const Tensor o = at::matmul(weights, v) / seen.sum(-1, true).clamp_min(1);
  const Tensor all = o.permute({0, 2, 1, 3}).flatten(2);  // [batch, tokens, dim]
  const Tensor gain = in.parameter("norm_weight").flatten();
  const Tensor normed = all / (all.square().mean(-1, true) + 1e-10).sqrt() * gain;
  return normed.view({o.size(0), o.size(2), o.size(1), o.size(3)}).permute({0, 2, 1, 3});
}

TEST(ZooLinear, IsTheFormula) {
  for (const bool causal : {false, true}) {
    const auto slow = [&](const SlowInputs& in) { return slow_transnormer(in, causal); };
    expect_definition(config_of("linear", causal), "", slow, 1e-7);
    expect_definition(config_of("linear", causal), "", 600, {600, 290}, slow, 1e-7);
  }
}

Tensor slow_cosformer(const SlowInputs& in, bool causal, double longest) {
  const std::int64_t tokens = in.q.size(2);
  const Tensor place = at::arange(tokens, at::kDouble);
  const Tensor distance = place.unsqueeze(1) - place.unsqueeze(0);
  const Tensor weights = at::matmul(in.q.clamp_min(0), in.k.clamp_min(0).transpose(-1, -2)) *
                         (std::numbers::pi / 2 * distance / longest).cos();
  return slow_average(weights, slow_visible(in, causal), in);
}

TEST(ZooCosformer, IsTheFormula) {
  for (const bool causal : {false, true}) {
    AttentionConfig config = config_of("cosformer", causal);
    expect_definition(config, "",
                      [&](const SlowInputs& in) { return slow_cosformer(in, causal, 140); });
    config.max_tokens = 700;
    expect_definition(config, "", 600, {600, 290},
                      [&](const SlowInputs& in) { return slow_cosformer(in, causal, 700); });
  }
}

TEST(ZooCosformer, RefusesMoreTokensThanItsWeightsAreFor) {
  const auto attention = made(config_of("cosformer"));
  EXPECT_THAT(error_of([&] { run(*attention, random_tokens(1, 141, 24)); }),
              HasSubstr("141 tokens, but its weights are for max_tokens = 140"));
}

TEST(ZooCosformer, RowsWithoutWeightAreZero) {
  const auto attention = made(config_of("cosformer"));
  {
    const at::NoGradGuard no_graph;
    attention->named_parameters()["query.bias"].fill_(-1e3);
  }
  Tensor x = random_tokens(1, 20, 24).requires_grad_();
  const Tensor y = run(*attention, x);
  const Tensor bias = attention->named_parameters()["output.bias"];
  EXPECT_LT(largest_difference(y, bias.expand_as(y)), 1e-6);
  y.sum().backward();
  EXPECT_TRUE(at::isfinite(x.grad()).all().item<bool>());
}

Tensor slow_kvt(const SlowInputs& in, bool causal, std::int64_t kept) {
  const Tensor scores = slow_scores(in);
  Tensor seen = slow_visible(in, causal).expand(scores.sizes()).clone();
  for (std::int64_t b = 0; b < scores.size(0); ++b) {
    for (std::int64_t h = 0; h < scores.size(1); ++h) {
      for (std::int64_t i = 0; i < scores.size(2); ++i) {
        std::vector<std::pair<double, std::int64_t>> row;
        for (std::int64_t j = 0; j < scores.size(3); ++j) {
          if (seen[b][h][i][j].item<bool>())
            row.emplace_back(-scores[b][h][i][j].item<double>(), j);
        }
        std::sort(row.begin(), row.end());
        const std::size_t most = kept > 0 ? static_cast<std::size_t>(kept) : (row.size() + 1) / 2;
        for (std::size_t rank = most; rank < row.size(); ++rank) {
          seen[b][h][i][row[rank].second] = false;
        }
      }
    }
  }
  return slow_softmax(scores, seen, in);
}

TEST(ZooKvt, KeepsTheLargestScores) {
  for (const bool causal : {false, true}) {
    for (const std::int64_t kept : {0, 1, 5, 100}) {
      const std::string options = kept > 0 ? "top_k = " + std::to_string(kept) : "";
      expect_definition(config_of("kvt", causal), options, 23, {17, 23, 1},
                        [&](const SlowInputs& in) { return slow_kvt(in, causal, kept); });
    }
    expect_definition(config_of("kvt", causal), "", 12, {},
                      [&](const SlowInputs& in) { return slow_kvt(in, causal, 0); });
  }
}

Tensor slow_local(const SlowInputs& in, bool causal, std::int64_t window) {
  const Tensor place = at::arange(in.q.size(2));
  const Tensor distance = (place.unsqueeze(1) - place.unsqueeze(0)).abs();
  return slow_softmax(slow_scores(in), slow_visible(in, causal).logical_and(distance.le(window)),
                      in);
}

TEST(ZooLocal, SeesAWindow) {
  for (const bool causal : {false, true}) {
    for (const std::int64_t window : {1, 4, 37, 100}) {
      expect_definition(config_of("local", causal), "window = " + std::to_string(window),
                        [&](const SlowInputs& in) { return slow_local(in, causal, window); });
    }
  }
}

// phi(x)_l = exp(w_l.x' - |x'|^2/2 - top) + 1e-4; for keys the top is over all channels of all keys
// that the row sees.
Tensor slow_performer(const SlowInputs& in, bool causal) {
  const Tensor w = in.parameter("projection").to(at::kDouble).clone();
  const double shrink = std::pow(static_cast<double>(in.q.size(-1)), -0.25);
  const auto logs = [&](const Tensor& x) {
    const Tensor y = x * shrink;
    return at::matmul(y, w.t()) - y.square().sum(-1, true) / 2;
  };
  const Tensor log_q = logs(in.q), log_k = logs(in.k);
  const Tensor fq = (log_q - log_q.detach().amax(-1, true)).exp() + 1e-4;
  const Tensor seen = slow_visible(in, causal);
  std::vector<Tensor> rows;
  for (std::int64_t i = 0; i < in.q.size(2); ++i) {
    const Tensor row = seen.narrow(2, i, 1).squeeze(2).unsqueeze(-1);  // [batch, 1, tokens, 1]
    const Tensor lows = at::full_like(log_k, -1e30);
    const Tensor shown = at::where(row, log_k, lows);
    const Tensor top = shown.detach().amax(at::IntArrayRef{2, 3}, true);
    const Tensor fk =
        at::where(row, (at::where(row, log_k, top) - top).exp() + 1e-4, at::zeros_like(log_k));
    rows.push_back(at::matmul(fq.narrow(2, i, 1), fk.transpose(-1, -2)));
  }
  return slow_average(at::cat(rows, 2), seen, in);
}

TEST(ZooPerformer, IsTheFormula) {
  for (const bool causal : {false, true}) {
    const auto slow = [&](const SlowInputs& in) { return slow_performer(in, causal); };
    expect_definition(config_of("performer", causal), "features = 20", slow, 1e-8);
    expect_definition(config_of("performer", causal), "features = 50", 7, {}, slow, 1e-8);
  }
  // Two chunks of the causal form.
  AttentionConfig config = config_of("performer", true);
  config.dim = 4;
  config.heads = 1;
  expect_definition(
      config, "features = 3", 270, {265},
      [](const SlowInputs& in) { return slow_performer(in, true); }, 1e-8);
}

TEST(ZooPerformer, FeaturesAreOrthogonalAndAsLongAsGaussianOnes) {
  AttentionConfig config = config_of("performer");
  config.dim = 96;
  const auto attention = made(config, "features = 3200");
  const Tensor w = attention->named_buffers()["projection"].to(at::kDouble);  // [3200, 32]
  const Tensor block = w.narrow(0, 32, 32);
  const Tensor gram = at::matmul(block, block.t());
  expect_near(gram - gram.diagonal().diag(), at::zeros_like(gram), 1e-5, "off the diagonal");
  const Tensor squares = w.square().sum(-1);
  // chi^2 with 32 degrees of freedom: mean 32, variance 64; 3200 draws.
  EXPECT_NEAR(squares.mean().item<double>(), 32, 4 * 8 / std::sqrt(3200.0));
  EXPECT_NEAR(squares.var().item<double>(), 64, 8);
  // Directions have no preference: E w w^T = 1.
  const Tensor second = at::matmul(w.t(), w) / 3200;
  expect_near(second, at::eye(32, at::kDouble), 0.15, "second moments");
}

TEST(ZooPerformer, EstimatesSoftmax) {
  const auto softmax = made(config_of("softmax"));
  const Tensor x = 0.4 * random_tokens(2, 37, 24);
  const Tensor exact = run(*softmax, x);
  const auto miss = [&](const std::string& options) {
    const auto performer = made(config_of("performer"), options);
    return ((run(*performer, x) - exact).norm() / exact.norm()).item<double>();
  };
  const double few = miss("features = 64"), many = miss("features = 8192");
  EXPECT_LT(many, 0.02);
  EXPECT_LT(many, few / 3);
}

TEST(ZooPerformer, RedrawsByTheStepOfTraining) {
  const auto attention = made(config_of("performer"), "redraw_steps = 100");
  const Tensor x = random_tokens(1, 20, 24);
  const auto projection = [&] { return attention->named_buffers()["projection"].clone(); };
  const Tensor first = projection();
  run(*attention, x, {}, 99);
  EXPECT_TRUE(at::equal(projection(), first));
  run(*attention, x, {}, 100);
  const Tensor second = projection();
  EXPECT_GT(largest_difference(second, first), 0.1);
  attention->eval();
  run(*attention, x, {}, 700);
  EXPECT_TRUE(at::equal(projection(), second)) << "evaluation draws nothing";
  attention->train();
  run(*attention, x, {}, 5);
  EXPECT_TRUE(at::equal(projection(), first)) << "a draw is a function of seed, layer and step";
  AttentionConfig other = config_of("performer");
  other.layer = 3;
  EXPECT_GT(largest_difference(made(other)->named_buffers()["projection"],
                               made(config_of("performer"))->named_buffers()["projection"]),
            0.1);
}

// A key whose features are e^60 times larger, last in the sequence, changes nothing before it.
TEST(ZooPerformer, ALargeKeyLeavesEarlierRowsAlone) {
  const auto attention = made(config_of("performer", true));
  attention->eval();
  Tensor x = random_tokens(1, 130, 24);
  const Tensor y = run(*attention, x);
  x.narrow(1, 129, 1).mul_(30);
  const Tensor z = run(*attention, x);
  expect_near(z.narrow(1, 0, 129), y.narrow(1, 0, 129), 1e-6, "rows before");
  EXPECT_TRUE(at::isfinite(z).all().item<bool>());
}

}  // namespace
}  // namespace lln_torch
