// LLN, Diag, their combinations and the feature maps of the core as modules, against their formulas
// on N x N weights; and where alpha and beta come from.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/zoo/lln.h"

#include <gmock/gmock.h>

#include <array>
#include <cstdio>

#include "lln/calibration.h"
#include "lln/moments.h"
#include "lln_torch/zoo/log_features.h"
#include "torch/zoo_cases.h"

namespace lln_torch {
namespace {

using testing::HasSubstr;
using zoo_cases::config_of;
using zoo_cases::error_of;
using zoo_cases::expect_definition;
using zoo_cases::expect_near;
using zoo_cases::made;
using zoo_cases::mask_of;
using zoo_cases::options_of;
using zoo_cases::random_tokens;
using zoo_cases::run;
using zoo_cases::slow_average;
using zoo_cases::slow_diag;
using zoo_cases::slow_scores;
using zoo_cases::slow_softmax;
using zoo_cases::slow_visible;
using zoo_cases::SlowInputs;

using FeatureMap = std::function<Tensor(const Tensor&)>;

// sum_l phi(alpha q_il) phi(beta k_jl), rows normalised; alpha, beta [batch or 1, heads].
Tensor slow_lln(const SlowInputs& in, bool causal, const Tensor& alpha, const Tensor& beta,
                const FeatureMap& phi) {
  const Tensor q = phi(in.q * alpha.unsqueeze(-1).unsqueeze(-1));
  const Tensor k = phi(in.k * beta.unsqueeze(-1).unsqueeze(-1));
  const Tensor weights = at::matmul(q, k.transpose(-1, -2));
  const Tensor seen = slow_visible(in, causal);
  return slow_average(at::where(seen, weights, at::zeros_like(weights)), seen, in);
}

Tensor slow_lln(
    const SlowInputs& in, bool causal, double alpha, double beta,
    const FeatureMap& phi = [](const Tensor& x) { return x.exp(); }) {
  const auto constant = [](double x) { return at::full({1, 1}, x, at::kDouble); };
  return slow_lln(in, causal, constant(alpha), constant(beta), phi);
}

// The line of mode per_head with the constants of D = 8: unbiased moments of the tokens that count,
// through which no gradient flows.
std::pair<Tensor, Tensor> slow_per_head(const SlowInputs& in) {
  const auto [a, b] = lln::matching_constants(8);
  const std::int64_t batch = in.q.size(0), heads = in.q.size(1);
  Tensor alpha = at::ones({batch, heads}, at::kDouble), beta = at::ones_like(alpha);
  for (std::int64_t s = 0; s < batch; ++s) {
    for (std::int64_t h = 0; h < heads; ++h) {
      const auto deviation = [&](const Tensor& x) {
        return x[s][h].detach().index({in.mask[s]}).std(/*unbiased=*/true).item<double>();
      };
      const double sq = deviation(in.q), sk = deviation(in.k);
      const double st = std::sqrt((sq * sq * sk * sk - b) / (2 * a));
      alpha[s][h] = st / sq;
      beta[s][h] = st / sk;
    }
  }
  return {alpha, beta};
}

TEST(ZooLln, MatchedPerHeadIsTheFormula) {
  const auto slow = [](const SlowInputs& in) {
    const auto [alpha, beta] = slow_per_head(in);
    return slow_lln(in, false, alpha, beta, [](const Tensor& x) { return x.exp(); });
  };
  expect_definition(config_of("lln"), "", 37, {}, slow);
  expect_definition(config_of("lln"), "", 29, {17, 29, 2}, slow);
}

TEST(ZooLln, WithoutMatchingItIsTheFormula) {
  for (const bool causal : {false, true}) {
    expect_definition(config_of("lln", causal), "matching = 'none'",
                      [&](const SlowInputs& in) { return slow_lln(in, causal, 1, 1); });
  }
}

TEST(ZooLln, LearnedScalesHaveGradients) {
  for (const bool causal : {false, true}) {
    expect_definition(config_of("lln", causal), "matching = 'learned'\nalpha = 1.5\nbeta = 0.7",
                      [&](const SlowInputs& in) {
                        return slow_lln(in, causal, in.parameter("log_alpha").exp().unsqueeze(0),
                                        in.parameter("log_beta").exp().unsqueeze(0),
                                        [](const Tensor& x) { return x.exp(); });
                      });
  }
}

// Matching beside the projection of v, the state made again: in host memory one after the other.
TEST(ZooLln, WorkBesideChangesNothing) {
  const Tensor mask = mask_of({37, 20}, 37);
  for (const char* options :
       {"", "matching = 'entropy'", "matching = 'none'", "matching = 'ema'", "matching = 'learned'",
        "diag = 'gate'", "diag = 'learned'", "two_sided = true"}) {
    for (const char* name : {"lln", "lln+diag"}) {
      if (std::string(options).starts_with("diag") && std::string(name) == "lln") continue;
      SCOPED_TRACE(std::string(name) + " " + options);
      std::vector<Tensor> results[2];
      for (const bool beside : {false, true}) {
        const auto attention = made(config_of(name), options);
        const Tensor x = random_tokens(2, 37, 24).requires_grad_();
        Context context{.side_work = beside};
        const Tensor y = attention->forward(x, mask, context);
        auto leaves = attention->parameters();
        leaves.push_back(x);
        results[beside] = torch::autograd::grad({y}, leaves, {random_tokens(2, 37, 24, 5)});
        results[beside].push_back(y);
      }
      for (std::size_t i = 0; i < results[0].size(); ++i) {
        EXPECT_TRUE(at::equal(results[1][i], results[0][i])) << i;
      }
    }
  }
}

// By the core, and through what carries them where the core is not asked for them.
TEST(ZooLln, ScalesHaveGradientsOutsideTheCore) {
  for (const bool causal : {false, true}) {
    const auto leaf = [](const Tensor& x) { return x.clone().requires_grad_(); };
    const Tensor x = at::randn({3, 2, 3, 29, 8}), g = at::randn({2, 3, 29, 8});
    std::array<std::vector<Tensor>, 2> results;
    for (const bool carried : {false, true}) {
      const Tensor q = leaf(x[0]), k = leaf(x[1]);
      const Tensor alpha = leaf(at::tensor({0.3F, 1.4F, 2.9F}));
      const Tensor beta = leaf(at::tensor({1.1F, 0.6F, 2.2F}));
      AttentionCall call{.causal = causal, .alpha = alpha, .beta = beta};
      if (carried) {
        call.alpha = alpha.detach();
        call.beta = beta.detach();
      }
      const Tensor o = carried ? attention(carrying(q, alpha), carrying(k, beta), x[2], call)
                               : attention(q, k, x[2], call);
      (o * g).sum().backward();
      results[carried] = {o.detach(), q.grad(), k.grad(), alpha.grad(), beta.grad()};
    }
    for (std::size_t i = 0; i < 3; ++i) EXPECT_TRUE(at::equal(results[0][i], results[1][i])) << i;
    for (std::size_t i = 3; i < 5; ++i) {
      expect_near(results[1][i], results[0][i], 1e-4, "of scale " + std::to_string(i - 3));
    }
  }
}

TEST(ZooLln, FeatureMapsAreTheirFormulas) {
  const std::map<std::string, FeatureMap> maps = {
      {"elu", [](const Tensor& x) { return at::where(x.gt(0), x + 1, x.clamp_max(0).exp()); }},
      {"relu", [](const Tensor& x) { return x.clamp_min(0) + 1e-3; }},
      {"power", [](const Tensor& x) { return x.square(); }}};
  for (const auto& [name, phi] : maps) {
    for (const bool causal : {false, true}) {
      expect_definition(
          config_of(name, causal), "",
          [&](const SlowInputs& in) { return slow_lln(in, causal, 1, 1, phi); }, 1e-8);
    }
  }
  expect_definition(
      config_of("power"), "power = 3",
      [](const SlowInputs& in) {
        return slow_lln(in, false, 1, 1, [](const Tensor& x) { return x.abs().pow(3); });
      },
      1e-8);
  expect_definition(
      config_of("lln"), "feature = 'softplus'\nmatching = 'frozen'\nalpha = 1.3",
      [](const SlowInputs& in) {
        return slow_lln(in, false, 1.3, 2, [](const Tensor& x) { return at::log1p(x.exp()); });
      },
      1e-6);
}

// LLN of ln phi with the exponential is LLN with phi: outputs, and gradients through torch.
TEST(ZooFeatureMaps, LogarithmsRunOnTheExponential) {
  torch::manual_seed(3);
  const Tensor scale = at::tensor({1.3, 0.7}, at::kDouble);
  for (const std::string feature : {"elu", "relu", "softplus", "power2", "power3", "power0.2"}) {
    std::vector<Tensor> found[2];
    const Tensor inputs = 2.5 * at::randn({3, 2, 2, 37, 5}, at::kDouble);
    inputs.narrow(3, 4, 1).mul_(8);      // beyond the switch of softplus
    inputs.narrow(3, 5, 1).fill_(1e-9);  // below the floor of power
    inputs.narrow(3, 6, 1).fill_(0);
    for (const bool outside : {false, true}) {
      std::vector<Tensor> leaves;
      for (const Tensor& x : inputs.unbind(0)) leaves.push_back(x.clone().requires_grad_());
      AttentionCall call{.feature = feature, .alpha = scale, .beta = scale};
      Tensor q = leaves[0], k = leaves[1];
      if (outside) {
        q = log_features(feature, q, scale);
        k = log_features(feature, k, scale);
        call = {.fixed_alpha = 1, .fixed_beta = 1};
      }
      const Tensor o = attention(q, k, leaves[2], call);
      found[outside ? 1 : 0] = torch::autograd::grad({(o * o.cos().detach()).sum()}, leaves);
      found[outside ? 1 : 0].push_back(o.detach());
    }
    for (std::size_t i = 0; i < found[0].size(); ++i) {
      EXPECT_TRUE(at::allclose(found[0][i], found[1][i], 1e-6, 1e-7)) << feature << ", " << i;
    }
  }
}

TEST(ZooDiag, IsSoftmaxInBlocks) {
  for (const bool causal : {false, true}) {
    expect_definition(config_of("diag", causal), "diag_block = 8",
                      [&](const SlowInputs& in) { return slow_diag(in, 8, causal); });
  }
}

// All that the key diag can be, for an attention with the fused op and for one without.
TEST(ZooDiag, CombinationsAreWeightedSums) {
  for (const bool causal : {false, true}) {
    for (const std::string name : {"lln", "softmax", "elu"}) {
      for (const std::string diag : {"average", "learned", "scales", "gate"}) {
        const std::string options =
            "diag_block = 8\ndiag = '" + diag + (name == "lln" ? "'\nmatching = 'none'" : "'");
        expect_definition(
            config_of(name, causal), options, 29, {17, 29, 1}, [&](const SlowInputs& in) {
              const Tensor near = slow_diag(in, 8, causal);
              const Tensor far =
                  name == "softmax" ? slow_softmax(slow_scores(in), slow_visible(in, causal), in)
                  : name == "lln"   ? slow_lln(in, causal, 1, 1)
                                    : slow_lln(in, causal, 1, 1, [](const Tensor& x) {
                                      return at::where(x.gt(0), x + 1, x.clamp_max(0).exp());
                                    });
              if (diag == "average") return (far + near) / 2;
              if (diag == "scales") {
                return in.parameter("diag_far").unsqueeze(1) * far +
                       in.parameter("diag_near").unsqueeze(1) * near;
              }
              Tensor share;
              if (diag == "learned") share = in.parameter("diag_mix").unsqueeze(1);
              if (diag == "gate") {
                const Tensor logits = zoo_cases::slow_linear(in.module, "diag_gate", in.x)
                                          .transpose(1, 2)
                                          .unsqueeze(-1);
                share = 1 / (1 + (-logits).exp());
              }
              return share * far + (1 - share) * near;
            });
      }
    }
  }
}

TEST(ZooDiag, NamesWithDiagAverageTheTwo) {
  const Tensor x = random_tokens(2, 37, 24);
  for (const std::string name : {"lln", "softmax", "elu", "performer"}) {
    const auto named = made(config_of(name + "+diag"));
    const auto asked = made(config_of(name), "diag = 'average'");
    EXPECT_TRUE(at::equal(run(*named, x), run(*asked, x))) << name;
  }
  EXPECT_THAT(error_of([] { made(config_of("elu+diag"), "diag = 'none'"); }),
              HasSubstr("anything but \"none\""));
}

TEST(ZooDiag, LeftPaddingMovesTheBlocksWithTheTokens) {
  const Tensor x = random_tokens(1, 30, 24);
  const Tensor padded = at::cat({at::full({1, 5, 24}, 40.0), x}, 1);
  const Tensor mask = at::cat({at::zeros({1, 5}, at::kBool), at::ones({1, 30}, at::kBool)}, 1);
  for (const std::string name : {"diag", "lln+diag", "softmax+diag"}) {
    for (const bool causal : {false, true}) {
      const auto attention = made(config_of(name, causal), "diag_block = 8");
      attention->eval();
      expect_near(run(*attention, padded, mask).narrow(1, 5, 30), run(*attention, x), 1e-5, name);
    }
  }
}

const LlnAttention& as_lln(const std::shared_ptr<Attention>& attention) {
  return dynamic_cast<const LlnAttention&>(*attention);
}

TEST(ZooLln, RunningMomentsAreThoseOfTheStepsBefore) {
  const AttentionConfig config = config_of("lln", true);
  const auto attention = made(config);
  ASSERT_EQ(as_lln(attention).matching(), "ema");
  const Tensor mask = mask_of({37, 20}, 37);
  const Tensor x = random_tokens(2, 37, 24);
  EXPECT_TRUE(at::equal(as_lln(attention).fixed_scales().first, at::ones({3}))) << "no step yet";
  const auto none = made(config, "matching = 'none'");
  expect_near(run(*attention, x, mask), run(*none, x, mask), 1e-6, "first step");
  // After one step: the moments of that step over both sequences, the constants of D = 8.
  const auto& module = as_lln(attention);
  const auto [alpha, beta] = module.fixed_scales();
  const auto heads = [&](const char* name) {
    return zoo_cases::slow_linear(module, name, x).view({2, 37, 3, 8}).permute({2, 0, 1, 3});
  };
  for (std::int64_t h = 0; h < 3; ++h) {
    const auto variance = [&](const char* name) {
      return heads(name)[h].index({mask}).var(/*unbiased=*/true).item<double>();
    };
    const double vq = variance("query"), vk = variance("key");
    const auto [a, b] = lln::matching_constants(8);
    const double st = std::sqrt((vq * vk - b) / (2 * a));
    EXPECT_NEAR(alpha[h].item<double>(), st / std::sqrt(vq), 1e-5 * st / std::sqrt(vq));
    EXPECT_NEAR(beta[h].item<double>(), st / std::sqrt(vk), 1e-5 * st / std::sqrt(vk));
  }
  attention->eval();
  run(*attention, 3 * x, mask);
  EXPECT_TRUE(at::equal(module.fixed_scales().first, alpha)) << "evaluation changes nothing";
}

TEST(ZooLln, FrozenScalesAreSetOnce) {
  const auto attention = made(config_of("lln"), "matching = 'frozen'\nalpha = 1.5\nbeta = 3");
  auto& module = dynamic_cast<LlnAttention&>(*attention);
  EXPECT_TRUE(at::allclose(module.fixed_scales().second, at::full({3}, 3.0)));
  const Tensor alpha = at::tensor({1.0, 1.5, 2.0}), beta = at::tensor({.5, .6, .7});
  module.set_frozen_scales(alpha, beta);
  EXPECT_TRUE(at::allclose(module.fixed_scales().first, alpha.to(at::kFloat)));
  EXPECT_THAT(error_of([&] { module.set_frozen_scales(at::ones({2}), beta); }),
              HasSubstr("shape [2], expected [3]"));
}

TEST(ZooLln, FrozenScalesAreThoseOfACalibration) {
  const std::string file = testing::TempDir() + "/zoo_lln_calibration.json";
  const auto layer = [](const char* name, std::vector<float> alpha, std::vector<float> beta) {
    return lln::CalibratedLayer{name, 8, 37, std::move(alpha), std::move(beta)};
  };
  lln::save_calibration({.layers = {layer("layer.0", {1, 1, 1}, {1, 1, 1}),
                                    layer("layer.1", {1, 1.5F, 2}, {.5F, .6F, .7F}),
                                    layer("layer.2", {1, 2}, {1, 2})}},
                        file);
  const std::string options = "matching = 'frozen'\ncalibration = '" + file + "'";
  AttentionConfig config = config_of("lln+diag");
  config.layer = 1;
  const auto attention = made(config, options);
  const auto [alpha, beta] = as_lln(attention).fixed_scales();
  EXPECT_TRUE(at::equal(alpha, at::tensor({1.0F, 1.5F, 2.0F})));
  EXPECT_TRUE(at::equal(beta, at::tensor({.5F, .6F, .7F})));
  EXPECT_TRUE(attention->named_buffers().contains("alpha"));
  config.layer = 2;
  EXPECT_THAT(error_of([&] { made(config, options); }), HasSubstr("shape [2], expected [3]"));
  config.layer = 3;
  EXPECT_THAT(error_of([&] { made(config, options); }), HasSubstr("layer.3"));
  config.layer = 1;
  EXPECT_THAT(error_of([&] { made(config, options + "\nalpha = 2"); }), HasSubstr("alpha"));
  std::remove(file.c_str());
}

TEST(ZooLln, ObserversSeeTheScales) {
  struct Last : Observer {
    void observe(const Observation& observation) override { seen = observation; }
    Observation seen;
  } last;
  const Tensor x = random_tokens(2, 37, 24);
  for (const std::string matching : {"per_head", "entropy", "none", "ema", "learned", "frozen"}) {
    const auto attention = made(config_of("lln+diag"), "matching = '" + matching + "'");
    Context context{.observer = &last};
    attention->forward(x, {}, context);
    ASSERT_TRUE(last.seen.alpha.defined()) << matching;
    EXPECT_EQ(last.seen.alpha.dim(), 2) << matching;
    EXPECT_EQ(last.seen.beta.size(1), 3) << matching;
    EXPECT_FALSE(last.seen.alpha.requires_grad()) << matching;
  }
}

TEST(ZooLln, RefusesModesThatReadTheFuture) {
  EXPECT_THAT(error_of([] { made(config_of("lln", true), "matching = 'per_head'"); }),
              HasSubstr("per_head"));
  EXPECT_THAT(error_of([] { made(config_of("lln"), "feature = 'elu'\nmatching = 'entropy'"); }),
              HasSubstr("entropy"));
  const auto attention = made(config_of("lln"));
  EXPECT_THAT(error_of([&] { as_lln(attention).fixed_scales(); }), HasSubstr("whole sequence"));
}

}  // namespace
}  // namespace lln_torch
