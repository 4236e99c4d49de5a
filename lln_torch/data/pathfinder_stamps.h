// What Pathfinder pictures are drawn with: dashes and discs, drawn twice as large and reduced by a
// Lanczos filter in 8 bits, with the ringing that this leaves around them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <vector>

#include "lln_torch/data/pathfinder.h"

namespace lln_torch {

constexpr int kDashLength = 2;   // pixels of the picture
constexpr int kDashMargin = 1;   // free on every side of a dash
constexpr int kFineScale = 2;    // pixels are drawn so many times finer
constexpr int kStampRadius = 4;  // dash, half its thickness rounded up, and margin
constexpr int kStampSize = 2 * kStampRadius + 1;
constexpr double kDiscRadius = 1.5;

// A dash that starts in the middle of a small square: its light, and the place that it takes.
struct DashStamp {
  std::array<float, kStampSize * kStampSize> light{};  // [row, column], 0 .. 1
  std::array<float, kStampSize * kStampSize> place{};  // 0 .. 1
};

// The dash in direction `angle` (rows grow with its sine, columns with its cosine).
const DashStamp& dash_stamp(double angle);

// Where a dash ends that starts at `from`: rounded up, as the published program rounds.
PathfinderPoint point_along(PathfinderPoint from, double angle, double distance);

// A disc in a picture of its own, 0 .. 1.
std::array<float, kPathfinderPixels> draw_disc(PathfinderPoint centre);

}  // namespace lln_torch
