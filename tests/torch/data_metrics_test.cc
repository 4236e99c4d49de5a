// Metrics against values computed by hand.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/metrics.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "lln/error.h"

namespace lln_torch {
namespace {

using Labels = std::vector<std::int32_t>;
using Scores = std::vector<float>;

TEST(Metrics, OfTwoClassesByHand) {
  const Labels labels = {1, 1, 1, 0, 0, 0, 0, 1};
  const Labels predicted = {1, 1, 0, 0, 0, 1, 0, 1};
  // 3 true positives, 1 false positive, 1 false negative, 3 true negatives.
  EXPECT_DOUBLE_EQ(accuracy(predicted, labels), 6.0 / 8);
  EXPECT_DOUBLE_EQ(f1(predicted, labels), 2 * 3.0 / (2 * 3 + 1 + 1));
  EXPECT_DOUBLE_EQ(matthews(predicted, labels), (3.0 * 3 - 1 * 1) / std::sqrt(4.0 * 4 * 4 * 4));
}

TEST(Metrics, MatthewsOfThreeClasses) {
  // The general form by hand: 4 of 6 right; predicted 2, 2, 2; true 2, 2, 2.
  EXPECT_DOUBLE_EQ(matthews(Labels{0, 2, 1, 1, 2, 0}, Labels{0, 0, 1, 1, 2, 2}),
                   (4.0 * 6 - 12) / (36 - 12));
}

TEST(Metrics, AreZeroWhereUndefined) {
  EXPECT_EQ(matthews(Labels{1, 1, 1}, Labels{0, 1, 1}), 0);
  EXPECT_EQ(f1(Labels{0, 0}, Labels{0, 0}), 0);
  EXPECT_EQ(pearson(Scores{1, 1, 1}, Scores{1, 2, 3}), 0);
  EXPECT_EQ(accuracy({}, {}), 0);
  EXPECT_EQ(spearman(Scores{NAN, 1, 2}, Scores{1, 2, 3}), 0);
}

TEST(Metrics, Correlations) {
  const Scores x = {1, 2, 3, 4, 5}, y = {5, 6, 7, 8, 7};
  // Sums by hand: xy = 6, xx = 10, yy = 5.2.
  EXPECT_NEAR(pearson(x, y), 6 / std::sqrt(10 * 5.2), 1e-12);
  // The ranks of y are 1 2 3.5 5 3.5: xy = 8, xx = 10, yy = 9.5.
  EXPECT_NEAR(spearman(x, y), 8 / std::sqrt(10 * 9.5), 1e-12);
  EXPECT_DOUBLE_EQ(spearman(Scores{1, 10, 100}, Scores{0.1f, 0.2f, 0.3f}), 1);
  EXPECT_DOUBLE_EQ(spearman(Scores{3, 2, 1}, Scores{0.1f, 0.2f, 0.3f}), -1);
}

TEST(Metrics, ByName) {
  EXPECT_DOUBLE_EQ(class_metric("f1", Labels{1, 0}, Labels{1, 1}), 2.0 / 3);
  EXPECT_DOUBLE_EQ(score_metric("spearman", Scores{1, 2}, Scores{3, 4}), 1);
  EXPECT_THROW(class_metric("pearson", Labels{1}, Labels{1}), lln::Error);
  EXPECT_THROW(score_metric("f1", Scores{1}, Scores{1}), lln::Error);
  EXPECT_THROW(accuracy(Labels{1}, Labels{1, 0}), lln::Error);
}

}  // namespace
}  // namespace lln_torch
