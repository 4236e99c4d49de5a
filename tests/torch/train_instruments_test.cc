// The instruments during training measure the matrix of the attention that is there, with its
// settings: what a layer shows, and what is measured of it.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/instruments.h"

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "lln_torch/zoo/attention.h"

namespace lln_torch {
namespace {

constexpr std::int64_t kDim = 16, kHeads = 2, kTokens = 24;

std::vector<nlohmann::ordered_json> measured(const std::string& name, const std::string& toml) {
  at::manual_seed(1);
  const Settings options = Settings::from_toml(toml, "test.toml");
  const auto attention = make_attention(
      {.name = name, .dim = kDim, .heads = kHeads, .max_tokens = kTokens, .layer = 3}, options);
  options.finish();
  attention->eval();
  const at::NoGradGuard no_graph;
  Recorder recorder(1, kTokens);
  Context context;
  context.observer = &recorder;
  attention->forward(4 * at::randn({1, kTokens, kDim}), {}, context);
  return measure_layers(recorder.layers(), false);
}

TEST(Instruments, MeasureTheMatrixOfTheAttention) {
  struct KindCase {
    const char* name;
    const char* options;
    const char* kind;
  };
  const KindCase cases[] = {
      {"lln", "", "lln"},
      {"lln+diag", "diag_block = 8", "lln"},
      {"lln", "feature = 'relu'", "relu"},
      {"lln", "feature = 'softplus'", "softplus"},
      {"lln", "feature = 'power'\npower = 3", "power3"},
      {"elu", "", "elu"},
      {"power", "", "power2"},
      {"power", "power = 1.5", "power1.5"},
      {"diag", "", "diag64"},
      {"diag", "diag_block = 4", "diag4"},
      {"quadratic", "", "quadratic"},
      {"linear", "", "linear"},
      {"performer+diag", "features = 32", "performer32"},
      {"softmax", "", "softmax"},
      {"nystromformer", "", "softmax"},
  };
  for (const KindCase& one : cases) {
    const auto heads = measured(one.name, one.options);
    ASSERT_EQ(heads.size(), static_cast<std::size_t>(kHeads)) << one.name;
    for (const auto& head : heads) {
      EXPECT_EQ(head["kind"], one.kind) << one.name << " " << one.options;
      EXPECT_EQ(head["layer"], 3);
      EXPECT_FALSE(head.contains("fault")) << head;
    }
  }
}

// Not the name alone: rows of blocks of 4 tokens have at most ln 4 of entropy, others more.
TEST(Instruments, MeasureWithTheSettingsOfTheAttention) {
  const auto entropy = [](const std::string& name, const std::string& options) {
    return measured(name, options)[0]["entropy"].get<double>();
  };
  EXPECT_LE(entropy("diag", "diag_block = 4"), std::log(4.0) + 1e-6);
  EXPECT_GT(entropy("diag", ""), entropy("diag", "diag_block = 4"));
  EXPECT_NE(entropy("lln", "feature = 'relu'"), entropy("lln", "matching = 'none'"));
  EXPECT_DOUBLE_EQ(entropy("lln", "feature = 'relu'"), entropy("relu", ""));
}

}  // namespace
}  // namespace lln_torch
