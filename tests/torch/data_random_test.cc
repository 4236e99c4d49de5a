// Random numbers of data: the published vectors of Philox, golden values that must never change (a
// resumed run would see other data), evenness, and shuffles that show everything once.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/random.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <vector>

namespace lln_torch {
namespace {

TEST(Random, IsPhilox) {
  // kat_vectors of the authors' Random123.
  EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}),
            (std::array<std::uint32_t, 4>{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
  constexpr std::uint32_t kOnes = 0xffffffff;
  EXPECT_EQ(philox({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
            (std::array<std::uint32_t, 4>{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
  EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
            (std::array<std::uint32_t, 4>{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST(Random, NeverChanges) {
  EXPECT_EQ(random_bits(0, 0, 0), 0xe169c58d6627e8d5u);
  Random random(7, Stream("test"), 3);
  std::vector<std::uint64_t> draws;
  for (int i = 0; i < 4; ++i) draws.push_back(random.below(std::uint64_t{1000}));
  EXPECT_EQ(draws, (std::vector<std::uint64_t>{155, 790, 760, 625}));
  std::vector<std::int64_t> order;
  const Permutation shuffled = permutation(7, 2, 10);
  for (int i = 0; i < 10; ++i) order.push_back(shuffled[i]);
  EXPECT_EQ(order, (std::vector<std::int64_t>{6, 5, 1, 4, 7, 3, 0, 8, 2, 9}));
}

TEST(Random, DependsOnEveryArgument) {
  std::set<std::uint64_t> seen;
  for (std::uint64_t seed = 0; seed < 10; ++seed) {
    for (std::uint64_t stream = 0; stream < 10; ++stream) {
      for (std::uint64_t index = 0; index < 10; ++index) {
        seen.insert(random_bits(seed, stream, index));
      }
    }
  }
  EXPECT_EQ(seen.size(), 1000u);
}

TEST(Random, BelowIsEven) {
  constexpr int kDraws = 70000;
  std::vector<int> counts(7);
  Random random(1, 2, 3);
  for (int i = 0; i < kDraws; ++i) ++counts[random.below(std::uint64_t{7})];
  double chi_squared = 0;
  for (const int count : counts) chi_squared += std::pow(count - 1e4, 2) / 1e4;
  EXPECT_LT(chi_squared, 22.5);  // 6 degrees of freedom: one seed in a thousand
  for (int i = 0; i < 1000; ++i) {
    const std::int64_t x = random.between(-2, 2);
    EXPECT_TRUE(x >= -2 && x <= 2);
  }
}

TEST(Random, NormalHasItsMoments) {
  constexpr int kDraws = 100000;
  Random random(5, 5, 5);
  double sum = 0, squares = 0, fourth = 0;
  for (int i = 0; i < kDraws; ++i) {
    const double x = random.normal();
    sum += x / kDraws;
    squares += x * x / kDraws;
    fourth += x * x * x * x / kDraws;
  }
  EXPECT_NEAR(sum, 0, 0.013);
  EXPECT_NEAR(squares, 1, 0.018);
  EXPECT_NEAR(fourth, 3, 0.13);
}

TEST(Permutation, ShowsEverythingOnce) {
  for (const std::int64_t size : {1, 2, 3, 255, 256, 257, 5000, 67349}) {
    const Permutation order = permutation(3, 1, size);
    std::vector<char> seen(static_cast<std::size_t>(size));
    for (std::int64_t i = 0; i < size; ++i) {
      ASSERT_LT(order[i], size);
      ++seen[static_cast<std::size_t>(order[i])];
    }
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), size);
  }
}

TEST(Permutation, EpochsAreUnlikeAndEven) {
  // Where the first of five numbers goes, over many epochs; and no number keeps its neighbour.
  constexpr int kEpochs = 20000;
  std::vector<std::vector<int>> counts(5, std::vector<int>(5));
  int neighbours = 0;
  for (std::uint64_t epoch = 0; epoch < kEpochs; ++epoch) {
    const Permutation order = permutation(9, epoch, 5);
    for (std::int64_t i = 0; i < 5; ++i) {
      ++counts[static_cast<std::size_t>(i)][static_cast<std::size_t>(order[i])];
      if (i > 0 && order[i] == order[i - 1] + 1) ++neighbours;
    }
  }
  for (const auto& row : counts) {
    for (const int count : row) EXPECT_NEAR(count, kEpochs / 5, 250);  // four standard deviations
  }
  EXPECT_NEAR(neighbours / static_cast<double>(kEpochs), 4.0 / 5, 0.03);
  int fixed = 0;
  const Permutation a = permutation(9, 0, 10000), b = permutation(9, 1, 10000);
  for (std::int64_t i = 0; i < 10000; ++i) fixed += a[i] == b[i] ? 1 : 0;
  EXPECT_LT(fixed, 8);  // 1 expected
}

}  // namespace
}  // namespace lln_torch
