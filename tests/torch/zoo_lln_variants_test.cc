// The variants of LLN, centred keys, wide and two-sided features and the contrast of the chain,
// against their formulas on N x N weights.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/autocast_mode.h>
#include <gmock/gmock.h>

#include "lln/moments.h"
#include "lln_torch/ops/matching.h"
#include "lln_torch/zoo/lln.h"
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
using zoo_cases::random_tokens;
using zoo_cases::run;
using zoo_cases::slow_diag;
using zoo_cases::slow_visible;
using zoo_cases::SlowInputs;

constexpr const char* kAll =
    "centred_keys = true\nwide = 20\ntwo_sided = true\nchain = 'contrast'\n";

struct Variant {
  bool centred = false, wide = false, two_sided = false, contrast = false;
};
constexpr Variant kEvery{true, true, true, true};

struct SlowFeatures {
  Tensor q, k;  // [batch, heads, tokens, features], 0 in padding
};

SlowFeatures slow_features(const SlowInputs& in, const Variant& variant) {
  const Tensor counts = in.mask.unsqueeze(1).unsqueeze(-1);
  const auto whole = [&](const Tensor& x) { return at::where(counts, x, at::zeros_like(x)); };
  SlowFeatures of{whole(in.q), whole(in.k)};
  if (variant.centred) {
    std::vector<Tensor> sequences;
    for (std::int64_t s = 0; s < in.k.size(0); ++s) {
      const Tensor own = of.k[s].index({at::indexing::Slice(), in.mask[s]});
      sequences.push_back(of.k[s] - own.sum(1, true) / own.size(1));
    }
    of.k = whole(at::stack(sequences));
  }
  for (Tensor* x : {&of.q, &of.k}) {
    if (variant.wide) *x = at::einsum("shnd,hdf->shnf", {*x, in.parameter("wide")});
    if (variant.two_sided) *x = at::cat({*x, -*x}, -1);
  }
  return of;
}

// alpha, beta [batch or 1, heads]; P [batch, heads, tokens, tokens] is written out.
Tensor slow_variant(const SlowInputs& in, const Variant& variant, const Tensor& alpha,
                    const Tensor& beta) {
  const SlowFeatures of = slow_features(in, variant);
  const auto wide = [](const Tensor& scale) { return scale.unsqueeze(-1).unsqueeze(-1); };
  const Tensor weights =
      at::matmul((of.q * wide(alpha)).exp(), (of.k * wide(beta)).exp().transpose(-1, -2));
  const Tensor seen = at::where(slow_visible(in, false), weights, at::zeros_like(weights));
  const Tensor chain = seen / seen.sum(-1, true);
  const Tensor v = at::where(in.mask.unsqueeze(1).unsqueeze(-1), in.v, at::zeros_like(in.v));
  const Tensor once = at::matmul(chain, v);
  if (!variant.contrast) return once;
  const Tensor l = 1 / (1 + (-in.parameter("chain")).exp());
  const Tensor two_steps = at::matmul(at::matmul(chain, chain), v);
  return once - l.view({1, -1, 1, 1}) * (two_steps - once);
}

Tensor slow_variant(const SlowInputs& in, const Variant& variant, double alpha, double beta) {
  const auto constant = [](double x) { return at::full({1, 1}, x, at::kDouble); };
  return slow_variant(in, variant, constant(alpha), constant(beta));
}

// The line of mode per_head on the features, with the constants of as many.
std::pair<Tensor, Tensor> slow_per_head(const SlowInputs& in, const SlowFeatures& of) {
  const auto [a, b] = lln::matching_constants(of.q.size(-1));
  Tensor alpha = at::ones({in.q.size(0), in.q.size(1)}, at::kDouble), beta = at::ones_like(alpha);
  for (std::int64_t s = 0; s < in.q.size(0); ++s) {
    for (std::int64_t h = 0; h < in.q.size(1); ++h) {
      const auto deviation = [&](const Tensor& x) {
        return x[s][h].detach().index({in.mask[s]}).std(/*unbiased=*/true).item<double>();
      };
      const double sq = deviation(of.q), sk = deviation(of.k);
      const double st = std::sqrt((sq * sq * sk * sk - b) / (2 * a));
      alpha[s][h] = st / sq;
      beta[s][h] = st / sk;
    }
  }
  return {alpha, beta};
}

// With alpha and beta of 1, given, learned and matched, without and with padding.
void expect_variant(const std::string& toml, const Variant& variant) {
  expect_definition(config_of("lln"), toml + "matching = 'none'",
                    [&](const SlowInputs& in) { return slow_variant(in, variant, 1, 1); });
  expect_definition(config_of("lln"), toml + "matching = 'frozen'\nalpha = 1.5\nbeta = 0.625",
                    [&](const SlowInputs& in) { return slow_variant(in, variant, 1.5, 0.625); });
  expect_definition(config_of("lln"), toml + "matching = 'learned'\nalpha = 1.2\nbeta = 0.7",
                    [&](const SlowInputs& in) {
                      return slow_variant(in, variant, in.parameter("log_alpha").exp().unsqueeze(0),
                                          in.parameter("log_beta").exp().unsqueeze(0));
                    });
  const auto matched = [&](const SlowInputs& in) {
    const auto [alpha, beta] = slow_per_head(in, slow_features(in, variant));
    return slow_variant(in, variant, alpha, beta);
  };
  expect_definition(config_of("lln"), toml, 37, {}, matched);
  expect_definition(config_of("lln"), toml, 29, {17, 29, 2}, matched);
}

TEST(ZooLlnVariants, CentredKeysAreTheFormula) {
  expect_variant("centred_keys = true\n", {.centred = true});
}

TEST(ZooLlnVariants, WideFeaturesAreTheFormula) { expect_variant("wide = 20\n", {.wide = true}); }

TEST(ZooLlnVariants, TwoSidedFeaturesAreTheFormula) {
  expect_variant("two_sided = true\n", {.two_sided = true});
}

TEST(ZooLlnVariants, ContrastIsTheFormula) {
  expect_variant("chain = 'contrast'\n", {.contrast = true});
}

TEST(ZooLlnVariants, AllOfThemGoTogether) { expect_variant(kAll, kEvery); }

TEST(ZooLlnVariants, EntropyIsMatchedOnTheFeatures) {
  for (const Variant& variant : {Variant{.two_sided = true}, Variant{.contrast = true}, kEvery}) {
    const std::string toml = variant.wide        ? kAll
                             : variant.two_sided ? "two_sided = true\n"
                                                 : "chain = 'contrast'\n";
    const auto slow = [&](const SlowInputs& in) {
      const SlowFeatures of = slow_features(in, variant);
      const auto [alpha, beta] = match_moments(
          of.q.detach(), of.k.detach(), {.mode = "entropy", .tokens = {.key_mask = in.mask}});
      return slow_variant(in, variant, alpha, beta);
    };
    expect_definition(config_of("lln"), toml + "matching = 'entropy'", 37, {}, slow);
    expect_definition(config_of("lln"), toml + "matching = 'entropy'", 29, {17, 29, 2}, slow);
  }
}

// Diag beside them is of q and k as they are.
TEST(ZooLlnVariants, DiagStaysAsItIs) {
  const std::map<std::string, Variant> variants = {{"two_sided = true\n", {.two_sided = true}},
                                                   {"chain = 'contrast'\n", {.contrast = true}},
                                                   {kAll, kEvery}};
  for (const auto& [toml, variant] : variants) {
    for (const std::string diag : {"average", "learned", "scales", "gate"}) {
      expect_definition(
          config_of("lln+diag"), toml + "matching = 'none'\ndiag_block = 8\ndiag = '" + diag + "'",
          29, {17, 29, 1}, [&, chosen = variant](const SlowInputs& in) {
            const Tensor near = slow_diag(in, 8, false), far = slow_variant(in, chosen, 1, 1);
            if (diag == "average") return (far + near) / 2;
            if (diag == "scales") {
              return in.parameter("diag_far").unsqueeze(1) * far +
                     in.parameter("diag_near").unsqueeze(1) * near;
            }
            Tensor share;
            if (diag == "learned") share = in.parameter("diag_mix").unsqueeze(1);
            if (diag == "gate") {
              const Tensor logits = zoo_cases::slow_linear(in.module, "diag_gate", in.x);
              share = 1 / (1 + (-logits.transpose(1, 2).unsqueeze(-1)).exp());
            }
            return share * far + (1 - share) * near;
          });
    }
  }
}

TEST(ZooLlnVariants, OneVectorMoreInAllKeysChangesNothing) {
  const Tensor x = random_tokens(2, 37, 24);
  const auto change = [&](const std::string& toml) {
    const auto attention = made(config_of("lln"), toml);
    const Tensor before = run(*attention, x);
    {
      const at::NoGradGuard no_graph;
      attention->named_parameters()["key.bias"].add_(at::arange(24) / 12.0);
    }
    return zoo_cases::largest_difference(run(*attention, x), before);
  };
  EXPECT_LT(change("centred_keys = true"), 1e-5);
  EXPECT_GT(change(""), 1e-2);
}

TEST(ZooLlnVariants, WideBeginsWithRotations) {
  const Settings options = zoo_cases::options_of("wide = 20");
  const auto attention = make_attention(config_of("lln"), options);
  const Tensor wide = attention->named_parameters()["wide"].detach();
  ASSERT_EQ(wide.sizes(), (std::vector<std::int64_t>{3, 8, 20}));
  for (const std::int64_t first : {0, 8}) {
    const Tensor block = wide.narrow(2, first, 8);
    expect_near(at::matmul(block.transpose(1, 2), block), at::eye(8).expand({3, 8, 8}), 1e-6,
                "a rotation");
  }
  expect_near(wide.square().sum(1), at::ones({3, 20}), 1e-6, "lengths of columns");
  EXPECT_GT(zoo_cases::largest_difference(wide[0], wide[1]), 0.1) << "one for each head";
}

// Whatever stands in padding, and with a sequence of no tokens.
TEST(ZooLlnVariants, PaddingChangesNoRowAndNoGradient) {
  const Tensor mask = mask_of({37, 20, 1, 0}, 37), counts = mask.unsqueeze(-1);
  const Tensor tokens = random_tokens(4, 37, 24);
  const Tensor weights = at::randn_like(tokens) * counts;
  std::vector<Tensor> results[2];
  for (int i = 0; i < 2; ++i) {
    const auto attention = made(config_of("lln+diag"), kAll);
    Tensor x = zoo_cases::with_garbage(tokens, mask, i == 0 ? 1 : 1000).requires_grad_();
    const Tensor y = run(*attention, x, mask);
    ASSERT_TRUE(at::isfinite(y).all().item<bool>());
    std::vector<Tensor> wanted = attention->parameters();
    wanted.push_back(x);
    results[i] = torch::autograd::grad({(y * weights).sum()}, wanted);
    results[i].push_back((y * counts).detach());
    const Tensor of_padding = results[i][wanted.size() - 1] * counts.logical_not();
    EXPECT_EQ(of_padding.abs().max().item<double>(), 0) << "gradient of padding";
  }
  for (std::size_t i = 0; i < results[0].size(); ++i) {
    expect_near(results[1][i], results[0][i], 1e-3, "result " + std::to_string(i));
  }
}

TEST(ZooLlnVariants, RunUnderBf16Autocast) {
  const auto attention = made(config_of("lln+diag"), std::string(kAll) + "diag = 'gate'");
  const Tensor mask = mask_of({65, 20}, 65), counts = mask.unsqueeze(-1);
  const Tensor x = (0.5 * random_tokens(2, 65, 24)).requires_grad_();
  const Tensor exact = run(*attention, x, mask).detach() * counts;
  at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
  at::autocast::set_autocast_enabled(at::kCPU, true);
  const Tensor y = run(*attention, x, mask).to(at::kFloat) * counts;
  at::autocast::clear_cache();
  at::autocast::set_autocast_enabled(at::kCPU, false);
  EXPECT_LT(((y - exact).norm() / exact.norm()).item<double>(), 0.05);
  y.square().sum().backward();
  for (const auto& parameter : attention->named_parameters()) {
    const Tensor& gradient = parameter.value().grad();
    ASSERT_TRUE(gradient.defined()) << parameter.key();
    EXPECT_TRUE(at::isfinite(gradient).all().item<bool>()) << parameter.key();
  }
}

TEST(ZooLlnVariants, RunningMomentsAreOfTheFeatures) {
  const auto attention = made(config_of("lln"), "wide = 20\nmatching = 'ema'\nema_decay = 0");
  const auto matched = made(config_of("lln"), "wide = 20");
  const Tensor x = random_tokens(1, 37, 24);
  run(*attention, x);
  attention->eval();
  expect_near(run(*attention, x), run(*matched, x), 1e-5, "after a step on the same sequence");
}

TEST(ZooLlnVariants, ObserversSeeWhatTheMapTakes) {
  struct Last : Observer {
    void observe(const Observation& observation) override { seen = observation; }
    Observation seen;
  } last;
  const auto attention = made(config_of("lln+diag"), kAll);
  const Tensor mask = mask_of({37, 20}, 37);
  Context context{.observer = &last};
  attention->forward(random_tokens(2, 37, 24), mask, context);
  const std::vector<std::int64_t> shape = {2, 3, 37, 40};
  EXPECT_EQ(last.seen.q.sizes(), shape);
  EXPECT_EQ(last.seen.k.sizes(), shape);
  EXPECT_FALSE(last.seen.k.requires_grad());
  const auto [alpha, beta] =
      match_moments(last.seen.q, last.seen.k, {.tokens = {.key_mask = mask}});
  EXPECT_TRUE(at::equal(last.seen.alpha, alpha));
  EXPECT_TRUE(at::equal(last.seen.beta, beta));
}

TEST(ZooLlnVariants, OptionsAreChecked) {
  const std::map<std::string, std::string> options = {
      {"centred_keys", "true"}, {"wide", "16"}, {"two_sided", "true"}, {"chain", "'contrast'"}};
  for (const auto& [key, value] : options) {
    const std::string toml = key + " = " + value;
    const std::string error = error_of([&] { made(config_of("lln+diag", true), toml); });
    EXPECT_THAT(error, HasSubstr(key));
    EXPECT_THAT(error, HasSubstr("bidirectional attention alone"));
    EXPECT_THAT(error_of([&] { made(config_of("elu"), toml); }), HasSubstr(key));
    EXPECT_EQ(made(config_of("lln+diag"), toml)->piece_unit(), 0) << key;
  }
  EXPECT_EQ(made(config_of("lln+diag"))->piece_unit(), kDiagBlock);
  EXPECT_THAT(error_of([] { made(config_of("lln"), "two_side = true"); }),
              HasSubstr("did you mean two_sided?"));
  EXPECT_THAT(error_of([] { made(config_of("lln"), "chain = 'contast'"); }),
              HasSubstr("did you mean contrast?"));
  EXPECT_THAT(error_of([] { made(config_of("lln"), "wide = 257"); }), HasSubstr("wide"));
  EXPECT_THAT(error_of([] { made(config_of("lln"), "wide = 200\ntwo_sided = true"); }),
              HasSubstr("256 in all at most"));
}

}  // namespace
}  // namespace lln_torch
