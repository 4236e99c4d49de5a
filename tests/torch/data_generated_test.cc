// What all generated tasks promise: a batch depends on its step and the seed alone, ranks read
// parts of one batch, an epoch shows every example once, and splits share nothing.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/generated.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <thread>

#include "expect_error.h"

namespace lln_torch {
namespace {

class GeneratedTask : public testing::TestWithParam<const char*> {
 protected:
  static std::unique_ptr<Source> source(const std::string& more = "") {
    return make_source(Settings::from_toml(GetParam() + ("\n" + more), "test"), "");
  }
};

void expect_same(const Batch& a, const Batch& b) {
  EXPECT_EQ(a.rows, b.rows);
  EXPECT_EQ(a.text.tokens, b.text.tokens);
  EXPECT_EQ(a.text.ids, b.text.ids);
  EXPECT_EQ(a.text.mask, b.text.mask);
  EXPECT_EQ(a.pixels, b.pixels);
  EXPECT_EQ(a.labels, b.labels);
}

// A row without its padding, to be compared between batches of different width.
std::vector<std::int32_t> row_of(const Batch& batch, std::int64_t row) {
  std::vector<std::int32_t> ids;
  for (std::int64_t i = 0; i < batch.text.tokens; ++i) {
    const auto at = static_cast<std::size_t>(row * batch.text.tokens + i);
    if (batch.text.mask.empty() || batch.text.mask[at] == 1) ids.push_back(batch.text.ids[at]);
  }
  return ids;
}

TEST_P(GeneratedTask, ABatchDependsOnItsStepAlone) {
  const auto first = source();
  const auto second = source();
  for (std::int64_t step = 0; step < 3; ++step) first->train_batch(step, 4, 0, 4);
  expect_same(first->train_batch(3, 4, 0, 4), second->train_batch(3, 4, 0, 4));
  expect_same(first->train_batch(1, 4, 0, 4), second->train_batch(1, 4, 0, 4));
  expect_same(first->validation_batch(2, 3), second->validation_batch(2, 3));
  EXPECT_NE(first->train_batch(0, 4, 0, 4).text.ids, first->train_batch(1, 4, 0, 4).text.ids);
}

TEST_P(GeneratedTask, RanksReadPartsOfOneBatch) {
  const auto all = source()->train_batch(5, 6, 0, 6);
  const auto part = source()->train_batch(5, 6, 2, 3);
  ASSERT_EQ(part.rows, 3);
  for (std::int64_t row = 0; row < 3; ++row) EXPECT_EQ(row_of(part, row), row_of(all, row + 2));
}

TEST_P(GeneratedTask, AnEpochShowsEveryExampleOnce) {
  const auto small = source("train_rows = 10");
  EXPECT_DOUBLE_EQ(small->steps_per_epoch(4), 2.5);
  std::map<std::vector<std::int32_t>, int> seen;
  for (std::int64_t step = 0; step < 5; ++step) {
    const Batch batch = small->train_batch(step, 4, 0, 4);
    for (std::int64_t row = 0; row < 4; ++row) ++seen[row_of(batch, row)];
  }
  EXPECT_EQ(seen.size(), 10u);
  for (const auto& [ids, count] : seen) EXPECT_EQ(count, 2);
}

TEST_P(GeneratedTask, SplitsShareNoExampleAndSeedsNoneOfTraining) {
  std::set<std::vector<std::int32_t>> seen;
  const auto add = [&](const Batch& batch) {
    for (std::int64_t row = 0; row < batch.rows; ++row) seen.insert(row_of(batch, row));
  };
  add(source("train_rows = 8")->train_batch(0, 8, 0, 8));
  add(source()->validation_batch(0, 8));
  add(source("validation_split = 'test'")->validation_batch(0, 8));
  add(source("train_rows = 8\nseed = 1")->train_batch(0, 8, 0, 8));
  EXPECT_EQ(seen.size(), 32u);
  expect_same(source("seed = 1")->validation_batch(0, 8), source()->validation_batch(0, 8));
}

TEST_P(GeneratedTask, ThreadsGetTheSame) {
  const auto shared = source();
  const Batch expected = shared->train_batch(7, 8, 0, 8);
  std::array<Batch, 4> batches;
  std::vector<std::thread> threads;
  for (Batch& batch : batches) {
    threads.emplace_back([&] { batch = shared->train_batch(7, 8, 0, 8); });
  }
  for (std::thread& thread : threads) thread.join();
  for (const Batch& batch : batches) expect_same(batch, expected);
}

TEST_P(GeneratedTask, RowsThatAreNotThereAreRefused) {
  const auto small = source("validation_rows = 10");
  EXPECT_EQ(small->validation_rows(), 10);
  lln::test::expect_error([&] { small->train_batch(0, 4, 2, 3); }, {"rows 2 to 5 of the 4 rows"});
  lln::test::expect_error([&] { small->train_batch(-1, 4, 0, 4); }, {"batch -1"});
  lln::test::expect_error([&] { small->validation_batch(8, 3); }, {"rows 8 to 11", "set of 10"});
}

TEST(RandomTokens, HidesAShareOfEachRow) {
  const auto source = make_source(
      Settings::from_toml("task = 'random-tokens'\ntokens = 8\nmask_share = 0.1", "test"), "");
  const Batch batch = source->train_batch(0, 2000, 0, 2000);
  constexpr std::int32_t kMask = 1;
  std::int64_t hidden = 0;
  for (std::size_t row = 0; row < 2000; ++row) {
    std::int64_t of_row = 0;
    for (std::size_t i = 8 * row; i < 8 * (row + 1); ++i) {
      const bool counts = batch.labels[i] != kIgnoredLabel;
      EXPECT_EQ(batch.text.ids[i] == kMask, counts);
      EXPECT_GT(counts ? batch.labels[i] : batch.text.ids[i], kMask);
      of_row += counts ? 1 : 0;
    }
    EXPECT_GT(of_row, 0);
    hidden += of_row;
  }
  // The mean is a tenth, and one more in rows where chance hides none: models count on it.
  EXPECT_NEAR(static_cast<double>(hidden) / 2000, 0.8 + 0.43, 0.1);
}

TEST(RandomTokens, PredictsTheNextToken) {
  const auto source = make_source(
      Settings::from_toml("task = 'random-tokens'\ntokens = 8\npredict = 'next'", "test"), "");
  EXPECT_EQ(source->task().kind, TaskKind::next_token);
  const Batch batch = source->train_batch(0, 3, 0, 3);
  for (std::size_t i = 0; i + 1 < batch.labels.size(); ++i) {
    if (i % 8 != 7) EXPECT_EQ(batch.labels[i], batch.text.ids[i + 1]);
  }
}

INSTANTIATE_TEST_SUITE_P(Tasks, GeneratedTask,
                         testing::Values("task = 'listops'\nlonger_than = 20\nshorter_than = 100",
                                         "task = 'mqar'\ntokens = 64\npairs = 8",
                                         "task = 'pathfinder32'",
                                         "task = 'random-tokens'\ntokens = 40",
                                         "task = 'random-tokens'\ntokens = 40\npredict = 'next'"),
                         [](const auto& tested) {
                           std::string text = tested.param;
                           text = text.substr(8, text.find('\'', 8) - 8);
                           std::ranges::replace(text, '-', '_');
                           return text + std::to_string(tested.index);
                         });

}  // namespace
}  // namespace lln_torch
