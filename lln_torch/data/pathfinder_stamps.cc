// Dashes have few different ends on the fine grid, so all stamps are made once.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/pathfinder_stamps.h"

#include <algorithm>
#include <cmath>

#include "lln_torch/data/resample.h"

namespace lln_torch {
namespace {

constexpr int kFineRadius = kStampRadius * kFineScale;
constexpr int kFineStamp = 2 * kFineRadius + 1;
constexpr int kFineDash = kDashLength * kFineScale;

// Reduces a square picture of 0 .. 255, rounding to 8 bits after each direction.
std::vector<float> reduce_bytes(const std::vector<float>& fine, int fine_size, int size) {
  const ResampleWeights weights = resample_weights(fine_size, 0, fine_size, size, Filter::lanczos3);
  const auto to_byte = [](float x) { return std::clamp(std::floor(x + 0.5F), 0.0F, 255.0F); };
  std::vector<float> narrow(static_cast<std::size_t>(fine_size * size));  // [fine row, column]
  std::vector<float> result(static_cast<std::size_t>(size * size));
  for (int row = 0; row < fine_size; ++row) {
    for (int column = 0; column < size; ++column) {
      const auto& pixel = weights.pixels[static_cast<std::size_t>(column)];
      float sum = 0;
      for (std::size_t k = 0; k < pixel.weights.size(); ++k) {
        sum += pixel.weights[k] * fine[static_cast<std::size_t>(row * fine_size + pixel.first) + k];
      }
      narrow[static_cast<std::size_t>(row * size + column)] = to_byte(sum);
    }
  }
  for (int row = 0; row < size; ++row) {
    const auto& pixel = weights.pixels[static_cast<std::size_t>(row)];
    for (int column = 0; column < size; ++column) {
      float sum = 0;
      for (std::size_t k = 0; k < pixel.weights.size(); ++k) {
        const auto fine_row = static_cast<std::size_t>(pixel.first) + k;
        sum += pixel.weights[k] *
               narrow[fine_row * static_cast<std::size_t>(size) + static_cast<std::size_t>(column)];
      }
      result[static_cast<std::size_t>(row * size + column)] = to_byte(sum);
    }
  }
  return result;
}

// Bresenham's line of one fine pixel's width from the middle.
std::vector<float> fine_line(int rows, int columns) {
  std::vector<float> fine(kFineStamp * kFineStamp, 0);
  int row = kFineRadius;
  int column = kFineRadius;
  const int row_step = rows < 0 ? -1 : 1;
  const int column_step = columns < 0 ? -1 : 1;
  const int steep = std::abs(rows);
  const int flat = std::abs(columns);
  int balance = steep > flat ? 2 * flat - steep : 2 * steep - flat;
  for (int i = 0; i <= std::max(steep, flat); ++i) {
    fine[static_cast<std::size_t>(row * kFineStamp + column)] = 255;
    const bool both = balance >= 0 && std::min(steep, flat) > 0;
    if (both) balance -= 2 * std::max(steep, flat);
    balance += 2 * std::min(steep, flat);
    if (steep > flat || both) row += row_step;
    if (steep <= flat || both) column += column_step;
  }
  return fine;
}

std::vector<float> fine_place(const std::vector<float>& line) {
  constexpr int kReach = kDashMargin * kFineScale;
  std::vector<float> place(line.size(), 0);
  for (int row = 0; row < kFineStamp; ++row) {
    for (int column = 0; column < kFineStamp; ++column) {
      if (line[static_cast<std::size_t>(row * kFineStamp + column)] == 0) continue;
      for (int r = -kReach; r <= kReach; ++r) {
        for (int c = -kReach; c <= kReach; ++c) {
          const int y = row + r;
          const int x = column + c;
          if (r * r + c * c > kReach * kReach) continue;
          if (y < 0 || x < 0 || y >= kFineStamp || x >= kFineStamp) continue;
          place[static_cast<std::size_t>(y * kFineStamp + x)] = 255;
        }
      }
    }
  }
  return place;
}

DashStamp make_dash_stamp(int rows, int columns) {
  DashStamp stamp;
  const std::vector<float> line = fine_line(rows, columns);
  const std::vector<float> light = reduce_bytes(line, kFineStamp, kStampSize);
  const std::vector<float> place = reduce_bytes(fine_place(line), kFineStamp, kStampSize);
  for (std::size_t i = 0; i < light.size(); ++i) {
    stamp.light[i] = light[i] / 255;
    stamp.place[i] = place[i] / 255;
  }
  return stamp;
}

constexpr int kDashEnds = 2 * kFineDash + 1;

std::vector<DashStamp> make_dash_stamps() {
  std::vector<DashStamp> stamps;
  for (int row = -kFineDash; row <= kFineDash; ++row) {
    for (int column = -kFineDash; column <= kFineDash; ++column) {
      stamps.push_back(make_dash_stamp(row, column));
    }
  }
  return stamps;
}

}  // namespace

PathfinderPoint point_along(PathfinderPoint from, double angle, double distance) {
  // A hair less than the number: sines of multiples of pi are not quite 0, and must not round up.
  const auto rounded_up = [](double x) { return static_cast<int>(std::ceil(x - 1e-9)); };
  return {rounded_up(from.row + distance * std::sin(angle)),
          rounded_up(from.column + distance * std::cos(angle))};
}

const DashStamp& dash_stamp(double angle) {
  static const std::vector<DashStamp> stamps = make_dash_stamps();
  const PathfinderPoint end = point_along({0, 0}, angle, kFineDash);
  return stamps[static_cast<std::size_t>((end.row + kFineDash) * kDashEnds + end.column +
                                         kFineDash)];
}

std::array<float, kPathfinderPixels> draw_disc(PathfinderPoint centre) {
  constexpr int kFine = kPathfinderSize * kFineScale;
  constexpr double kFineDisc = kDiscRadius * kFineScale;
  std::vector<float> fine(kFine * kFine, 0);
  for (int row = 0; row < kFine; ++row) {
    for (int column = 0; column < kFine; ++column) {
      const int y = row - centre.row * kFineScale;
      const int x = column - centre.column * kFineScale;
      if (y * y + x * x <= kFineDisc * kFineDisc) {
        fine[static_cast<std::size_t>(row * kFine + column)] = 255;
      }
    }
  }
  const std::vector<float> reduced = reduce_bytes(fine, kFine, kPathfinderSize);
  std::array<float, kPathfinderPixels> disc{};
  for (std::size_t i = 0; i < disc.size(); ++i) disc[i] = reduced[i] / 255;
  return disc;
}

}  // namespace lln_torch
