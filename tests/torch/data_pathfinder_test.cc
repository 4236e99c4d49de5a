// Pathfinder pictures: the statistics of the published set, discs that are truly connected where
// the label says so, and the same pictures for the same numbers.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/pathfinder.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <numbers>

#include "lln_torch/data/pathfinder_stamps.h"
#include "picture_statistics.h"

namespace lln_torch {
namespace {

constexpr std::uint64_t kPictures = 1500;

const std::vector<PathfinderPicture>& pictures() {
  static const std::vector<PathfinderPicture> made = [] {
    std::vector<PathfinderPicture> result;
    for (std::uint64_t i = 0; i < kPictures; ++i) {
      result.push_back(make_pathfinder(Random(11, 4, i), {}));
    }
    return result;
  }();
  return made;
}

// Walks over lit pixels of a contour from `from`, over the gaps between two dashes: joints are 4
// pixels apart, rounded up, and free on both sides.
bool reaches(const PathfinderPicture::Contour& contour, PathfinderPoint from, PathfinderPoint to) {
  constexpr int kGap = 4;
  std::array<bool, kPathfinderPixels> seen{};
  const auto index = [](PathfinderPoint p) {
    return static_cast<std::size_t>(p.row * kPathfinderSize + p.column);
  };
  std::vector<PathfinderPoint> open = {from};
  seen[index(from)] = true;
  while (!open.empty()) {
    const PathfinderPoint p = open.back();
    open.pop_back();
    if (p == to) return true;
    for (int r = -kGap; r <= kGap; ++r) {
      for (int c = -kGap; c <= kGap; ++c) {
        const PathfinderPoint q{p.row + r, p.column + c};
        if (r * r + c * c > kGap * kGap || q.row < 0 || q.column < 0 || q.row >= kPathfinderSize ||
            q.column >= kPathfinderSize) {
          continue;
        }
        if (seen[index(q)] || (contour.drawn[index(q)] < 0.1F && !(q == to))) continue;
        seen[index(q)] = true;
        open.push_back(q);
      }
    }
  }
  return false;
}

TEST(Pathfinder, StatisticsAreThoseOfThePublishedSet) {
  test::PictureStatistics statistics;
  for (const PathfinderPicture& picture : pictures()) {
    statistics.add(static_cast<std::uint8_t>(picture.label), picture.pixels);
  }
  // 2,000 pictures of the published set; standard errors there .045 for the mean.
  EXPECT_NEAR(statistics.mean(), 20.18, 0.3);
  EXPECT_NEAR(statistics.deviation(), 51.1, 0.5);
  EXPECT_NEAR(statistics.deviation_of_means(), 1.99, 0.2);
  EXPECT_NEAR(statistics.lit(), 160.9, 4);
  EXPECT_NEAR(statistics.bright(), 87.05, 2);
  EXPECT_NEAR(statistics.positive(), 0.5, 0.06);
  EXPECT_LT(statistics.row(0), 1);
  EXPECT_LT(statistics.column(31), 1);
}

TEST(Pathfinder, DiscsSitOnTheEndsThatTheLabelNames) {
  int positive = 0;
  for (const PathfinderPicture& picture : pictures()) {
    const auto& [one, two] = picture.contours;
    const PathfinderPicture::Contour& from = picture.discs[0] == one.first_end ? one : two;
    ASSERT_EQ(picture.discs[0], from.first_end);
    if (picture.label == 1) {
      ++positive;
      EXPECT_EQ(picture.discs[1], from.last_end);
      EXPECT_TRUE(reaches(from, picture.discs[0], picture.discs[1]));
    } else {
      EXPECT_EQ(picture.discs[1], (&from == &one ? two : one).last_end);
    }
    for (const PathfinderPoint disc : picture.discs) {
      // The middle of a disc is the brightest light but for that of the short contours.
      const auto at = static_cast<std::size_t>(disc.row * kPathfinderSize + disc.column);
      EXPECT_GT(picture.pixels[at], 190);
    }
  }
  EXPECT_GT(positive, 0);
}

// A walk that could reach anything would prove nothing: without the middle of a contour it fails.
TEST(Pathfinder, TheWalkAlongAContourCanFail) {
  int broken = 0;
  for (std::size_t i = 0; i < 100; ++i) {
    PathfinderPicture::Contour contour = pictures()[i].contours[0];
    ASSERT_TRUE(reaches(contour, contour.first_end, contour.last_end));
    for (std::size_t p = 0; p < contour.drawn.size(); ++p) {
      const int row = static_cast<int>(p) / kPathfinderSize;
      const int column = static_cast<int>(p) % kPathfinderSize;
      const int near =
          std::min(std::hypot(row - contour.first_end.row, column - contour.first_end.column),
                   std::hypot(row - contour.last_end.row, column - contour.last_end.column)) < 4;
      if (near == 0) contour.drawn[p] = 0;
    }
    if (!reaches(contour, contour.first_end, contour.last_end)) ++broken;
  }
  EXPECT_GT(broken, 60);  // some contours end where they began
}

TEST(Pathfinder, DashesAndDiscsAreThoseOfThePublishedPictures) {
  // Values of a published picture: a vertical dash of a long contour (133, 191, 151 after division
  // by 1.154), a horizontal one (151, 176, 133), and the rows of a disc.
  const auto byte = [](float light) {
    return static_cast<int>(light * 1.5F / 1.1529F * 255 + 0.5F);
  };
  const DashStamp& down = dash_stamp(std::numbers::pi / 2);
  const auto at = [](int row, int column) {
    return static_cast<std::size_t>((row + kStampRadius) * kStampSize + column + kStampRadius);
  };
  EXPECT_NEAR(byte(down.light[at(0, 0)]), 133, 1);
  EXPECT_NEAR(byte(down.light[at(1, 0)]), 191, 1);
  EXPECT_NEAR(byte(down.light[at(2, 0)]), 151, 1);
  const DashStamp& left = dash_stamp(std::numbers::pi);
  EXPECT_NEAR(byte(left.light[at(0, -2)]), 151, 1);
  EXPECT_NEAR(byte(left.light[at(0, -1)]), 176, 1);
  EXPECT_NEAR(byte(left.light[at(0, 0)]), 133, 1);
  const auto disc = draw_disc({10, 10});
  const int expected[4][4] = {
      {0, 28, 65, 3}, {28, 228, 254, 133}, {66, 255, 255, 190}, {0, 132, 178, 55}};
  for (int r = 0; r < 4; ++r) {
    for (int c = 0; c < 4; ++c) {
      const auto i = static_cast<std::size_t>((8 + r) * kPathfinderSize + 8 + c);
      EXPECT_NEAR(disc[i] * 255, expected[r][c], 1) << r << " " << c;
    }
  }
}

TEST(Pathfinder, SamePicturesOnEveryMachine) {
  const PathfinderPicture picture = make_pathfinder(Random(1, 2, 3), {});
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < picture.pixels.size(); ++i) sum += (i % 97 + 1) * picture.pixels[i];
  EXPECT_EQ(picture.label, 0);
  EXPECT_EQ(picture.discs[0], (PathfinderPoint{14, 15}));
  EXPECT_EQ(picture.discs[1], (PathfinderPoint{17, 5}));
  EXPECT_EQ(sum, 912919u);
}

TEST(Pathfinder, ShapesAreKept) {
  const PathfinderPicture bare = make_pathfinder(Random(1, 2, 4), {6, 0, 1});
  // Six dashes of at most 3 x 2 lit pixels, twice, and two discs.
  EXPECT_LT(std::count_if(bare.pixels.begin(), bare.pixels.end(), [](int x) { return x > 20; }),
            2 * 6 * 6 + 2 * 14);
  const auto source =
      make_source(Settings::from_toml("task = 'pathfinder32'\nform = 'pixels'", "test"), "");
  EXPECT_EQ(source->task().height, 32);
  EXPECT_EQ(source->task().vocabulary, 0);
  const Batch pixels = source->validation_batch(0, 2);
  const Batch ids =
      make_source(Settings::from_toml("task = 'pathfinder32'", "test"), "")->validation_batch(0, 2);
  ASSERT_EQ(pixels.pixels.size(), ids.text.ids.size());
  EXPECT_EQ(pixels.labels, ids.labels);
  for (std::size_t i = 0; i < pixels.pixels.size(); ++i) {
    EXPECT_NEAR(pixels.pixels[i], static_cast<float>(ids.text.ids[i]) / 127.5F - 1, 1e-6);
  }
}

}  // namespace
}  // namespace lln_torch
