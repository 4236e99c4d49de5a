// Names of attentions, their errors, and what all projected ones share: rotary positions, biases,
// options that nobody asks for.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>

#include <fstream>
#include <iterator>

#include "torch/zoo_cases.h"

namespace lln_torch {
namespace {

using testing::HasSubstr;
using zoo_cases::config_of;
using zoo_cases::error_of;
using zoo_cases::expect_near;
using zoo_cases::made;
using zoo_cases::random_tokens;

TEST(ZooList, FindsNames) {
  EXPECT_STREQ(find_attention("softmax").name, "softmax");
  EXPECT_STREQ(find_attention("lln+diag").name, "lln+diag");
  EXPECT_STREQ(find_attention("elu+diag").name, "elu");
  EXPECT_THAT(error_of([] { find_attention("sotfmax"); }), HasSubstr("did you mean softmax?"));
  EXPECT_THAT(error_of([] { find_attention("elu+daig"); }), HasSubstr("did you mean elu+diag?"));
  EXPECT_THAT(error_of([] { find_attention("diag+diag"); }), HasSubstr("cannot be combined"));
  EXPECT_THAT(error_of([] { find_attention(""); }), HasSubstr("lln zoo"));
}

TEST(ZooList, DocsHaveEveryAttention) {
  std::ifstream file(LLN_ZOO_PAGE);
  ASSERT_TRUE(file) << LLN_ZOO_PAGE;
  const std::string page{std::istreambuf_iterator<char>(file), {}};
  for (const ZooEntry& entry : zoo()) {
    EXPECT_THAT(page, HasSubstr(std::string("\n| `") + entry.name + "` |"));
  }
}

TEST(ZooList, RefusesSizesThatContradict) {
  AttentionConfig config = config_of("softmax");
  config.heads = 5;
  EXPECT_THAT(error_of([&] { made(config); }), HasSubstr("dim 24 does not divide into 5 heads"));
  config = config_of("softmax");
  config.max_tokens = 0;
  EXPECT_THAT(error_of([&] { made(config); }), HasSubstr("max_tokens is 0"));
  for (const ZooEntry& entry : zoo()) {
    if (entry.causal) continue;
    EXPECT_THAT(error_of([&] { made(config_of(entry.name, true)); }),
                HasSubstr("has no causal form"));
  }
}

TEST(ZooList, OptionsOfOthersAreUnknown) {
  EXPECT_THAT(error_of([] { made(config_of("softmax"), "matching = 'none'"); }),
              HasSubstr("matching"));
  EXPECT_THAT(error_of([] { made(config_of("local"), "diag = 'average'"); }), HasSubstr("diag"));
  EXPECT_THAT(error_of([] { made(config_of("lln"), "diag_blok = 4\ndiag = 'gate'"); }),
              HasSubstr("did you mean diag_block?"));
}

TEST(ZooList, ProjectionsMayBeWithoutBias) {
  AttentionConfig config = config_of("softmax");
  config.bias = false;
  EXPECT_EQ(made(config)->named_parameters().size(), 4U);
  config.bias = true;
  EXPECT_EQ(made(config)->named_parameters().size(), 8U);
}

// q.k of rotated vectors depends on the distance of their positions alone.
TEST(ZooList, RotaryPositionsAreRelative) {
  const auto attention = made(config_of("softmax"));
  auto& projected = dynamic_cast<ProjectedAttention&>(*attention);
  const auto rotary = [](std::int64_t first, std::int64_t tokens) {
    Context context;
    const Tensor rates = at::pow(10000.0, -at::arange(4) / 4.0);
    const Tensor angles = (at::arange(tokens) + first).unsqueeze(1) * rates;  // [tokens, 4]
    context.rotary_cos = at::cat({angles.cos(), angles.cos()}, -1);
    context.rotary_sin = at::cat({angles.sin(), angles.sin()}, -1);
    return context;
  };
  const Tensor x = random_tokens(1, 20, 24);
  const auto scores = [&](std::int64_t first) {
    const auto [q, k, v] = projected.project(x, rotary(first, 20));
    return at::matmul(q, k.transpose(-1, -2));
  };
  expect_near(scores(100), scores(0), 1e-4, "scores");
  // By hand, one pair of channels: (x, y) -> (x cos - y sin, y cos + x sin).
  const auto plain = projected.project(x, {});
  const auto turned = projected.project(x, rotary(0, 20));
  const double angle = 7 * std::pow(10000.0, -0.25);
  const double a = plain.q[0][1][7][1].item<double>(), b = plain.q[0][1][7][5].item<double>();
  EXPECT_NEAR(turned.q[0][1][7][1].item<double>(), a * std::cos(angle) - b * std::sin(angle), 1e-5);
  EXPECT_NEAR(turned.q[0][1][7][5].item<double>(), b * std::cos(angle) + a * std::sin(angle), 1e-5);
  EXPECT_TRUE(at::equal(turned.v, plain.v));
}

}  // namespace
}  // namespace lln_torch
