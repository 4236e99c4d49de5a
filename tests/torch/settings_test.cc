// Configs: values, defaults, --set, and errors that name the key and what was meant.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/config/settings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "expect_error.h"

namespace lln_torch {
namespace {

using lln::test::error_of;
using testing::HasSubstr;

constexpr const char* kText = R"(
seed = 7
names = ["a", "b"]
[train]
steps = 300   # a comment
rate = 1e-3
schedule = "cosine"
clip = 1
)";

TEST(Settings, ReadsValuesAndDefaults) {
  const Settings all = Settings::from_toml(kText, "run.toml");
  const Settings train = all.table("train");
  EXPECT_EQ(all.integer("seed", 0, 0, 100), 7);
  EXPECT_EQ(all.texts("names"), (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(train.integer("steps", 1, 1, 1000), 300);
  EXPECT_DOUBLE_EQ(train.number("rate", 0, 0, 1), 1e-3);
  EXPECT_DOUBLE_EQ(train.number("clip", 0, 0, 10), 1);  // an integer is a number
  EXPECT_EQ(train.choice("schedule", "linear", {"linear", "cosine"}), "cosine");
  EXPECT_TRUE(train.flag("bf16", true));
  all.finish();
  EXPECT_EQ(all.resolved()["train"]["bf16"], true);
  // What a run stores gives the same settings.
  const Settings again = Settings::from_json(all.resolved(), "stored");
  EXPECT_EQ(again.table("train").integer("steps", 1, 1, 1000), 300);
}

TEST(Settings, SetReplacesAndAdds) {
  Settings all = Settings::from_toml(kText, "run.toml");
  all.set("train.steps=5");
  all.set("model.attention.name=lln+diag");
  all.set("train.bf16=false");
  EXPECT_EQ(all.table("train").integer("steps", 1, 1, 1000), 5);
  EXPECT_FALSE(all.table("train").flag("bf16", true));
  EXPECT_EQ(all.table("model").table("attention").text("name", ""), "lln+diag");
  EXPECT_THAT(error_of([&] { all.set("steps"); }), HasSubstr("expected KEY=VALUE"));
  EXPECT_THAT(error_of([&] { all.set("seed.x=1"); }), HasSubstr("no table"));
  EXPECT_THAT(error_of([&] { all.set("train.steps=7\nseed = 3"); }),
              HasSubstr("--set train.steps: expected one value"));
  EXPECT_EQ(all.table("train").integer("steps", 1, 1, 1000), 5);
}

TEST(Settings, NamesEveryKeyThatNobodyAskedFor) {
  const Settings all = Settings::from_toml("[train]\nsteps = 1\nlerning_rate = 2\nzzz = 1\n", "r");
  const Settings train = all.table("train");
  train.integer("steps", 1, 1, 9);
  train.number("learning_rate", 0, 0, 9);
  const std::string error = error_of([&] { all.finish(); });
  EXPECT_THAT(error, HasSubstr("train.lerning_rate (did you mean learning_rate?)"));
  EXPECT_THAT(error, HasSubstr("train.zzz"));
}

TEST(Settings, RefusesWrongTypesAndValues) {
  const Settings all = Settings::from_toml(kText, "run.toml");
  const Settings train = all.table("train");
  EXPECT_THAT(error_of([&] { train.integer("rate", 0, 0, 1); }),
              HasSubstr("run.toml: train.rate: expected an integer"));
  EXPECT_THAT(error_of([&] { train.integer("steps", 0, 0, 100); }),
              HasSubstr("expected 0 to 100, found 300"));
  EXPECT_THAT(error_of([&] {
                train.choice("schedule", "", {"linear", "cosin"});
              }),
              HasSubstr("found \"cosine\" (did you mean cosin?)"));
  EXPECT_THAT(error_of([&] { all.table("seed"); }), HasSubstr("expected a table"));
  EXPECT_THAT(error_of([&] { all.required_text("text"); }), HasSubstr("text: missing"));
  EXPECT_THAT(error_of([] { Settings::from_toml("a = 1\nb = \n", "broken.toml"); }),
              HasSubstr("broken.toml:2:"));
  EXPECT_THAT(error_of([] { Settings::from_file("/nowhere.toml"); }), HasSubstr("/nowhere.toml"));
}

}  // namespace
}  // namespace lln_torch
