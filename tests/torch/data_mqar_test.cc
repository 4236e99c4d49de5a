// Multi-query associative recall: labels found again from the ids alone, the ranges of keys and
// values, and where queries stand.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/mqar.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <set>

#include "expect_error.h"
#include "small_sources.h"

namespace lln_torch {
namespace {

// Reads the pairs, then answers every labelled place from them.
void check_example(const MqarExample& example, const MqarShape& shape) {
  ASSERT_EQ(example.ids.size(), static_cast<std::size_t>(shape.tokens));
  ASSERT_EQ(example.labels.size(), example.ids.size());
  std::map<std::int32_t, std::int32_t> pairs;
  std::set<std::int32_t> values;
  const auto context = static_cast<std::size_t>(2 * shape.pairs);
  for (std::size_t i = 0; i < context; i += 2) {
    EXPECT_GE(example.ids[i], 1);
    EXPECT_LT(example.ids[i], shape.vocabulary / 2);
    EXPECT_GE(example.ids[i + 1], shape.vocabulary / 2);
    EXPECT_LT(example.ids[i + 1], shape.vocabulary);
    EXPECT_TRUE(pairs.emplace(example.ids[i], example.ids[i + 1]).second) << "a key twice";
    EXPECT_TRUE(values.insert(example.ids[i + 1]).second) << "a value twice";
  }
  std::set<std::int32_t> asked;
  for (std::size_t i = 0; i < example.ids.size(); ++i) {
    EXPECT_GE(example.ids[i], 0);
    EXPECT_LT(example.ids[i], shape.vocabulary);
    if (example.labels[i] == kIgnoredLabel) continue;
    EXPECT_GE(i, context);
    EXPECT_EQ(i % 2, 0u);
    ASSERT_TRUE(pairs.contains(example.ids[i]));
    EXPECT_EQ(example.labels[i], pairs[example.ids[i]]);
    EXPECT_TRUE(asked.insert(example.ids[i]).second) << "asked twice";
  }
  EXPECT_EQ(asked.size(), pairs.size());
}

TEST(Mqar, EveryKeyIsAskedOnceAndAnsweredByItsValue) {
  for (const MqarShape& shape :
       {MqarShape{}, MqarShape{.vocabulary = 64, .tokens = 64, .pairs = 16},
        MqarShape{.vocabulary = 16, .tokens = 28, .pairs = 7},
        MqarShape{.tokens = 4, .pairs = 1, .random_filler = false}}) {
    for (std::uint64_t item = 0; item < 100; ++item) {
      check_example(make_mqar(Random(7, 1, item), shape), shape);
    }
  }
}

TEST(Mqar, FillerIsRandomOrNothing) {
  MqarShape shape{.vocabulary = 100, .tokens = 256, .pairs = 4, .random_filler = false};
  const MqarExample plain = make_mqar(Random(1, 1, 1), shape);
  EXPECT_EQ(std::count(plain.ids.begin(), plain.ids.end(), 0), 256 - 3 * 4);
  shape.random_filler = true;
  const MqarExample filled = make_mqar(Random(1, 1, 1), shape);
  EXPECT_LT(std::count(filled.ids.begin(), filled.ids.end(), 0), 12);
  EXPECT_EQ(plain.labels, filled.labels);
}

// The first drawn place has probability weight / sum of weights; with one pair it is the only one.
TEST(Mqar, QueriesFollowThePowerLaw) {
  const MqarShape shape{.vocabulary = 64, .tokens = 18, .pairs = 1, .power = 0.01};
  std::array<double, 8> expected{};
  double sum = 0;
  for (std::size_t i = 0; i < 8; ++i) {
    sum += expected[i] = std::pow(static_cast<double>(i + 1), shape.power - 1);
  }
  std::array<int, 8> counts{};
  constexpr int kDraws = 20000;
  for (std::uint64_t item = 0; item < kDraws; ++item) {
    const MqarExample example = make_mqar(Random(2, 3, item), shape);
    for (std::size_t i = 0; i < 8; ++i) {
      if (example.labels[2 + 2 * i] != kIgnoredLabel) ++counts[i];
    }
  }
  for (std::size_t i = 0; i < 8; ++i) {
    const double share = expected[i] / sum;
    EXPECT_NEAR(counts[i] / double{kDraws}, share, 5 * std::sqrt(share * (1 - share) / kDraws));
  }
}

TEST(Mqar, SameNumbersOnEveryMachine) {
  const MqarShape shape{.vocabulary = 32, .tokens = 16, .pairs = 3};
  const MqarExample example = make_mqar(Random(1, 2, 3), shape);
  EXPECT_EQ(example.ids,
            (std::vector<std::int32_t>{9, 21, 14, 26, 15, 22, 9, 8, 6, 8, 12, 19, 15, 1, 14, 10}));
  for (std::size_t i = 0; i < example.labels.size(); ++i) {
    EXPECT_EQ(example.labels[i], i == 6 ? 21 : i == 12 ? 22 : i == 14 ? 26 : kIgnoredLabel);
  }
}

TEST(Mqar, SourceGivesWhatItIsAskedFor) {
  const auto source = source_of("task = 'mqar'\nvocabulary = 128\ntokens = 64\npairs = 8");
  EXPECT_EQ(source->task().kind, TaskKind::next_token);
  EXPECT_EQ(source->task().vocabulary, 128);
  EXPECT_DOUBLE_EQ(source->task().chance, 1.0 / 64);
  const Batch batch = source->train_batch(0, 4, 0, 4);
  EXPECT_EQ(batch.text.ids.size(), 4u * 64);
  EXPECT_EQ(batch.labels.size(), 4u * 64);
  EXPECT_EQ(batch.text.tokens, 64);
  EXPECT_TRUE(batch.text.mask.empty());
}

TEST(Mqar, ImpossibleShapesAreRefused) {
  lln::test::expect_error([] { source_of("task = 'mqar'\ntokens = 63"); }, {"tokens", "even"});
  lln::test::expect_error([] { source_of("task = 'mqar'\ntokens = 64\npairs = 17"); },
                          {"pairs", "17", "at most a quarter of the tokens, 16"});
  lln::test::expect_error([] { source_of("task = 'mqar'\nvocabulary = 16\npairs = 8"); },
                          {"pairs", "at most the 7 keys of a vocabulary of 16"});
}

}  // namespace
}  // namespace lln_torch
