// Pathfinder-32, hard, of the Long Range Arena: two long dashed contours, short ones that distract,
// and two discs. Do the discs sit on the ends of one contour? Made as Linsley et al. (2018,
// "Learning long-range spatial dependencies with horizontal gated recurrent units") made theirs,
// with the numbers of the Arena's set.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lln_torch/config/settings.h"
#include "lln_torch/data/batch.h"
#include "lln_torch/data/random.h"

namespace lln_torch {

constexpr int kPathfinderSize = 32;
constexpr int kPathfinderPixels = kPathfinderSize * kPathfinderSize;

struct PathfinderShape {
  std::int64_t contour_length = 14;  // dashes
  std::int64_t distractors = 5;
  std::int64_t distractor_length = 4;
};

struct PathfinderPoint {
  int row = 0;
  int column = 0;
  bool operator==(const PathfinderPoint&) const = default;
};

struct PathfinderPicture {
  std::array<std::uint8_t, kPathfinderPixels> pixels{};
  std::int32_t label = 0;  // 1: the discs are on one contour
  // How it came about: each contour alone, as it was drawn, with its ends; and the discs, on the
  // first end of one contour and on the last end of the same or the other one.
  struct Contour {
    std::array<float, kPathfinderPixels> drawn{};
    PathfinderPoint first_end;
    PathfinderPoint last_end;
  };
  std::array<Contour, 2> contours;
  std::array<PathfinderPoint, 2> discs;
};

PathfinderPicture make_pathfinder(Random random, const PathfinderShape& shape);

std::unique_ptr<Source> make_pathfinder_source(const Settings& data, const std::string& folder);

}  // namespace lln_torch
