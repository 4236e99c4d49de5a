// ListOps: values against an evaluator that reads the text of an expression, the rules by which
// trees grow, and the numbers that a seed gives on every machine.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/listops.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <sstream>

#include "expect_error.h"
#include "small_sources.h"

namespace lln_torch {
namespace {

// The definition, slowly: words, recursion, a sorted list.
class TextEvaluator {
 public:
  explicit TextEvaluator(const std::string& text) : words_(text) {}

  int evaluate() {
    const int result = list_or_digit();
    std::string rest;
    EXPECT_FALSE(words_ >> rest) << "words after the expression: " << rest;
    return result;
  }
  std::size_t fewest() const { return fewest_; }
  std::size_t most() const { return most_; }
  int deepest() const { return deepest_; }

 private:
  int list_or_digit() {
    std::string word;
    words_ >> word;
    if (word[0] != '[') return word[0] - '0';
    ++depth_;
    deepest_ = std::max(deepest_, depth_);
    std::vector<int> arguments;
    while (words_ >> std::ws && words_.peek() != ']') arguments.push_back(list_or_digit());
    std::string bracket;
    words_ >> bracket;
    --depth_;
    fewest_ = std::min(fewest_, arguments.size());
    most_ = std::max(most_, arguments.size());
    return apply(word.substr(1), arguments);
  }

  static int apply(const std::string& name, std::vector<int> arguments) {
    std::sort(arguments.begin(), arguments.end());
    if (name == "MIN") return arguments.front();
    if (name == "MAX") return arguments.back();
    if (name == "SM") {
      int sum = 0;
      for (const int x : arguments) sum += x;
      return sum % 10;
    }
    EXPECT_EQ(name, "MED");
    const std::size_t n = arguments.size();
    const double median =
        n % 2 == 1 ? arguments[n / 2] : (arguments[n / 2 - 1] + arguments[n / 2]) / 2.0;
    return static_cast<int>(median);
  }

  std::istringstream words_;
  int depth_ = 0;
  int deepest_ = 0;
  std::size_t fewest_ = 100;
  std::size_t most_ = 0;
};

TEST(ListOps, ValuesAreThoseOfTheText) {
  std::size_t fewest = 100;
  std::size_t most = 0;
  int deepest = 0;
  std::array<int, 10> seen{};
  for (std::uint64_t item = 0; item < 300; ++item) {
    const ListOpsExample example = make_listops(Random(3, 1, item), {});
    EXPECT_GT(example.ids.size(), 500u);
    EXPECT_LT(example.ids.size(), 2000u);
    TextEvaluator evaluator(listops_text(example.ids));
    ASSERT_EQ(evaluator.evaluate(), example.value) << listops_text(example.ids);
    fewest = std::min(fewest, evaluator.fewest());
    most = std::max(most, evaluator.most());
    deepest = std::max(deepest, evaluator.deepest());
    ++seen[static_cast<std::size_t>(example.value)];
  }
  EXPECT_EQ(fewest, 2u);
  EXPECT_EQ(most, 10u);
  EXPECT_EQ(deepest, 9);  // the tenth level holds digits alone
  for (const int count : seen) EXPECT_GT(count, 0);
}

TEST(ListOps, SmallTreesAreRightInEveryOperator) {
  const ListOpsShape shape{.longer_than = 3, .shorter_than = 30, .depth = 3, .arguments = 5};
  std::array<int, 4> operators{};
  for (std::uint64_t item = 0; item < 3000; ++item) {
    const ListOpsExample example = make_listops(Random(5, 2, item), shape);
    const std::string text = listops_text(example.ids);
    ASSERT_EQ(TextEvaluator(text).evaluate(), example.value) << text;
    ++operators[static_cast<std::size_t>(example.ids[0] - kListOpsOperator)];
  }
  for (const int count : operators) EXPECT_NEAR(count, 750, 120);
}

TEST(ListOps, SameNumbersOnEveryMachine) {
  const ListOpsShape shape{.longer_than = 5, .shorter_than = 24, .depth = 4, .arguments = 4};
  EXPECT_EQ(listops_text(make_listops(Random(1, 2, 3), shape).ids), "[MED [MAX 6 3 ] 4 ]");
  EXPECT_EQ(make_listops(Random(1, 2, 3), {}).ids.size(), 1117u);
}

TEST(ListOps, MajorityClassIsMeasuredAndNearThePublishedOne) {
  const auto source = source_of("task = 'listops'");
  EXPECT_EQ(source->task().vocabulary, 16);
  EXPECT_EQ(source->task().classes, 10);
  EXPECT_EQ(source->validation_rows(), 2000);
  EXPECT_DOUBLE_EQ(source->steps_per_epoch(32), 3000);
  // Published: 17.2%; of 2,000 rows the standard deviation is .8%.
  EXPECT_NEAR(source->task().chance, 0.172, 0.025);
  EXPECT_THAT(source->task().chance_text, testing::HasSubstr("of 2000 rows (0 "));
  const Batch batch = source->validation_batch(10, 4);
  EXPECT_EQ(batch.labels.size(), 4u);
  for (std::int64_t row = 0; row < 4; ++row) {
    const std::span<const std::int32_t> ids(batch.text.ids.data() + row * batch.text.tokens,
                                            static_cast<std::size_t>(batch.text.tokens));
    EXPECT_EQ(TextEvaluator(listops_text(ids)).evaluate(),
              batch.labels[static_cast<std::size_t>(row)]);
    for (std::int64_t i = 0; i < batch.text.tokens; ++i) {
      const auto at = static_cast<std::size_t>(row * batch.text.tokens + i);
      EXPECT_EQ(batch.text.ids[at] != kListOpsPad, batch.text.mask[at] == 1);
    }
  }
}

TEST(ListOps, TestSplitAndFixedLength) {
  const Batch validation = source_of("task = 'listops'")->validation_batch(0, 2);
  const Batch test =
      source_of("task = 'listops'\nvalidation_split = 'test'")->validation_batch(0, 2);
  EXPECT_NE(validation.text.ids, test.text.ids);
  const Batch fixed = source_of("task = 'listops'\nfixed_length = true")->validation_batch(0, 2);
  EXPECT_EQ(fixed.text.tokens, 1999);
}

TEST(ListOps, ImpossibleShapesAreRefused) {
  lln::test::expect_error([] { source_of("task = 'listops'\nshorter_than = 505"); },
                          {"shorter_than", "at least 10 more than longer_than"});
  lln::test::expect_error(
      [] { make_listops(Random(1, 1, 1), {.longer_than = 100, .shorter_than = 200, .depth = 2}); },
      {"longer than 100", "shorter than 200", "depth 2"});
}

}  // namespace
}  // namespace lln_torch
