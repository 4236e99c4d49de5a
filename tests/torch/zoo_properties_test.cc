// What holds for every attention of the zoo, whatever its definition: a new entry is tested here
// without being named.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/autocast_mode.h>

#include <map>

#include "torch/zoo_cases.h"

namespace lln_torch {
namespace {

using zoo_cases::AttentionCase;
using zoo_cases::config_alone;
using zoo_cases::every_attention;
using zoo_cases::expect_near;
using zoo_cases::largest_difference;
using zoo_cases::made;
using zoo_cases::mask_of;
using zoo_cases::name_of;
using zoo_cases::random_tokens;
using zoo_cases::run;
using zoo_cases::with_garbage;

class ZooProperties : public testing::TestWithParam<AttentionCase> {
 protected:
  AttentionConfig config() const { return config_alone(GetParam()); }
};

TEST_P(ZooProperties, EveryLengthGivesFiniteRowsOfTheSameShape) {
  const auto attention = made(config());
  for (const std::int64_t tokens : {0, 1, 2, 7, 37, 64, 65, 131, 140}) {
    const Tensor x = random_tokens(2, tokens, config().dim);
    const Tensor y = run(*attention, x);
    ASSERT_EQ(y.sizes(), x.sizes()) << tokens << " tokens";
    ASSERT_TRUE(at::isfinite(y).all().item<bool>()) << tokens << " tokens";
  }
}

TEST_P(ZooProperties, PaddingChangesNoRowAndNoGradient) {
  const Tensor mask = mask_of({37, 20, 1, 0}, 37);
  const Tensor counts = mask.unsqueeze(-1);
  const Tensor tokens = random_tokens(4, 37, config().dim);
  const Tensor weights = at::randn_like(tokens) * counts;
  Tensor outputs[2];
  std::vector<Tensor> gradients[2];
  for (int i = 0; i < 2; ++i) {
    const auto attention = made(config());  // a new one: training may leave traces
    at::manual_seed(100 + static_cast<std::uint64_t>(i));
    Tensor x = with_garbage(tokens, mask, i == 0 ? 1 : 1000).requires_grad_();
    const Tensor y = run(*attention, x, mask);
    ASSERT_TRUE(at::isfinite(y).all().item<bool>());
    outputs[i] = (y * counts).detach();
    std::vector<Tensor> wanted = attention->parameters();
    wanted.push_back(x);
    gradients[i] = torch::autograd::grad({(y * weights).sum()}, wanted, {}, std::nullopt, false,
                                         /*allow_unused=*/true);
  }
  EXPECT_GT(outputs[0].abs().max().item<double>(), 1e-3);
  expect_near(outputs[1], outputs[0], 2e-5, "rows that count");
  const auto names = made(config())->named_parameters().keys();
  for (std::size_t i = 0; i < gradients[0].size(); ++i) {
    const std::string what = "gradient of " + (i < names.size() ? names[i] : "the tokens");
    if (gradients[0][i].defined()) {
      expect_near(gradients[1][i], gradients[0][i], 1e-3, what);
    }
  }
  const Tensor of_padding = gradients[1].back() * counts.logical_not();
  EXPECT_EQ(of_padding.abs().max().item<double>(), 0) << "gradient of padding";
}

TEST_P(ZooProperties, NeighboursInTheBatchChangeNothing) {
  const auto attention = made(config());
  attention->eval();
  const Tensor x = random_tokens(3, 37, config().dim);
  const Tensor together = run(*attention, x);
  for (std::int64_t b = 0; b < 3; ++b) {
    const Tensor alone = run(*attention, x.narrow(0, b, 1));
    expect_near(alone, together.narrow(0, b, 1), 2e-5, "sequence " + std::to_string(b));
  }
}

TEST_P(ZooProperties, TheFutureNeverChangesThePast) {
  if (!GetParam().causal) GTEST_SKIP() << "not causal";
  const auto attention = made(config());
  attention->eval();
  const Tensor x = random_tokens(2, 131, config().dim);
  if (GetParam().name.starts_with("reformer")) {
    // Tokens to come share in the sorting, so they may change which earlier keys a row sees, never
    // what it takes from them.
    Tensor all = x.clone().requires_grad_();
    const Tensor early = run(*attention, all).narrow(1, 0, 30);
    early.square().sum().backward();
    EXPECT_EQ(all.grad().narrow(1, 30, 101).abs().max().item<double>(), 0);
    EXPECT_GT(all.grad().narrow(1, 0, 30).abs().max().item<double>(), 0);
    return;
  }
  const Tensor y = run(*attention, x);
  for (const std::int64_t past : {1, 30, 64, 130}) {
    Tensor changed = x.clone();
    changed.narrow(1, past, 131 - past).mul_(-3).add_(5);
    const Tensor z = run(*attention, changed);
    expect_near(z.narrow(1, 0, past), y.narrow(1, 0, past), 1e-5,
                "rows before " + std::to_string(past));
    EXPECT_GT(largest_difference(z.narrow(1, past, 131 - past), y.narrow(1, past, 131 - past)),
              1e-3);
    // Nor does it matter how many tokens are to come.
    expect_near(run(*attention, x.narrow(1, 0, past)), y.narrow(1, 0, past), 1e-5,
                "the first " + std::to_string(past) + " tokens alone");
  }
}

TEST_P(ZooProperties, GradientsReachEveryParameterAndToken) {
  const auto attention = made(config());
  Tensor x = random_tokens(2, 131, config().dim).requires_grad_();
  // An attention may hand parameters to the next layer: what is carried counts as a result.
  Context context;
  Tensor loss = (attention->forward(x, {}, context) * at::randn_like(x)).sum();
  for (auto& [name, carried] : context.carried) loss = loss + (carried * carried).sum();
  loss.backward();
  for (const auto& parameter : attention->named_parameters()) {
    const Tensor& gradient = parameter.value().grad();
    ASSERT_TRUE(gradient.defined()) << parameter.key();
    EXPECT_TRUE(at::isfinite(gradient).all().item<bool>()) << parameter.key();
    // Adding one vector to all keys changes no softmax.
    if (parameter.key() == "key.bias") continue;
    EXPECT_GT(gradient.abs().max().item<double>(), 0) << parameter.key();
  }
  EXPECT_TRUE((x.grad().abs().amax(-1) > 0).all().item<bool>()) << "a token without a gradient";
}

TEST_P(ZooProperties, IsAFunctionOfSeedsStepAndInput) {
  const Tensor x = random_tokens(2, 131, config().dim);
  const auto attention = made(config()), twin = made(config());
  const Tensor y = run(*attention, x, {}, 5);
  EXPECT_TRUE(at::equal(run(*twin, x, {}, 5), y)) << "another module of the same seeds";
  attention->eval();
  const Tensor z = run(*attention, x, {}, 5);
  EXPECT_TRUE(at::equal(run(*attention, x, {}, 5), z)) << "the same module again";
}

TEST_P(ZooProperties, WeightsAreAllOfItsState) {
  const Tensor x = random_tokens(2, 131, config().dim);
  const auto attention = made(config(), "", 1), other = made(config(), "", 2);
  if (attention->parameters().empty()) GTEST_SKIP() << "no weights";
  for (int step = 0; step < 3; ++step) run(*attention, x * (step + 1), {}, 1200 * step);
  attention->eval();
  other->eval();
  const Tensor y = run(*attention, x, {}, 2400);
  EXPECT_GT(largest_difference(run(*other, x, {}, 2400), y), 1e-3);
  {
    const at::NoGradGuard no_graph;
    auto parameters = other->named_parameters();
    for (const auto& item : attention->named_parameters()) {
      parameters[item.key()].copy_(item.value());
    }
    auto buffers = other->named_buffers();
    for (const auto& item : attention->named_buffers()) buffers[item.key()].copy_(item.value());
  }
  EXPECT_TRUE(at::equal(run(*other, x, {}, 2400), y));
}

class Bf16Autocast {
 public:
  Bf16Autocast() {
    at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
    at::autocast::set_autocast_enabled(at::kCPU, true);
  }
  ~Bf16Autocast() {
    at::autocast::clear_cache();
    at::autocast::set_autocast_enabled(at::kCPU, false);
  }
};

TEST_P(ZooProperties, RunsUnderBf16Autocast) {
  const auto attention = made(config());
  attention->eval();
  const Tensor mask = mask_of({65, 20}, 65);
  Tensor x = 0.5 * random_tokens(2, 65, config().dim);
  const Tensor exact = run(*attention, x, mask).detach();
  x.requires_grad_();
  Tensor y;
  {
    const Bf16Autocast on;
    y = run(*attention, x, mask);
  }
  ASSERT_TRUE(at::isfinite(y).all().item<bool>());
  const Tensor miss = (y.to(at::kFloat) - exact).detach() * mask.unsqueeze(-1);
  const double relative = (miss.norm() / (exact * mask.unsqueeze(-1)).norm()).item<double>();
  EXPECT_LT(relative, 0.05);
  (y.to(at::kFloat) * mask.unsqueeze(-1)).square().sum().backward();
  EXPECT_TRUE(at::isfinite(x.grad()).all().item<bool>());
}

TEST_P(ZooProperties, ObserversSeeQAndKOfTheLayer) {
  struct Last : Observer {
    void observe(const Observation& observation) override { seen.push_back(observation); }
    std::vector<Observation> seen;
  } last;
  const auto attention = made(config());
  const Tensor mask = mask_of({37, 20}, 37);
  Context context{.observer = &last};
  attention->forward(random_tokens(2, 37, config().dim), mask, context);
  ASSERT_EQ(last.seen.size(), 1U);
  EXPECT_EQ(last.seen[0].layer, config().layer);
  EXPECT_EQ(last.seen[0].name, GetParam().name);
  if (!last.seen[0].q.defined()) return;
  const std::vector<std::int64_t> shape = {2, 3, 37, 8};
  EXPECT_EQ(last.seen[0].q.sizes(), shape);
  EXPECT_EQ(last.seen[0].k.sizes(), shape);
  EXPECT_FALSE(last.seen[0].q.requires_grad());
  EXPECT_TRUE(at::equal(last.seen[0].key_mask, mask));
}

TEST(Zoo, EntriesSayEverything) {
  std::map<std::string, int> names;
  for (const ZooEntry& entry : zoo()) {
    for (const char* text :
         {entry.name, entry.summary, entry.cost, entry.parameters, entry.padding}) {
      ASSERT_NE(text, nullptr) << entry.name;
      EXPECT_NE(std::string(text), "") << entry.name;
    }
    EXPECT_EQ(++names[entry.name], 1) << entry.name;
    EXPECT_NE(entry.make, nullptr);
  }
}

INSTANTIATE_TEST_SUITE_P(All, ZooProperties, testing::ValuesIn(every_attention()),
                         [](const auto& made_case) { return name_of(made_case.param); });

}  // namespace
}  // namespace lln_torch
