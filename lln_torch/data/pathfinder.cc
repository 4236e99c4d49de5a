// Contours grow dash by dash. A dash ends on a circle around the joint behind the last one, where
// the weight of a place is cos^2 of the turn times how free the place is; the places taken by all
// dashes but the last of each contour are closed. Two long contours start near each other in the
// middle; if one of them runs into a corner, both are begun again.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/pathfinder.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "lln_torch/data/generated.h"
#include "lln_torch/data/pathfinder_stamps.h"

namespace lln_torch {
namespace {

constexpr int kStartDistance = 7;   // between the first dashes of the two contours
constexpr double kLongLight = 1.5;  // 2 times .75: the long contours are the dimmer ones
constexpr double kShortLight = 2;
// Where the first contour starts: how often the discs of the reference set stand on each of the
// nine pixels in the middle, row by row.
constexpr int kFirstStart = 14;
constexpr std::array<std::int64_t, 9> kStarts = {77, 100, 133, 65, 100, 127, 63, 142, 159};
constexpr std::int64_t kStartSum = 966;
constexpr int kDashTries = 3;
// Left to themselves the short contours fill pictures of this size: 4.6 of 5 find a place. In the
// reference set there are 1.1 on average, spread as 5 tosses are, and seldom on a long contour. So
// each is tossed for, tried once, and kept one pixel away from the long ones.
constexpr double kShortShare = 0.465;
constexpr double kCrossing = 1.8;  // two dashes may not take a place together
constexpr double kFree = 0.3;      // a first dash may touch what is taken no more than this

using PathfinderPlane = std::array<float, kPathfinderPixels>;

std::size_t pixel_at(int row, int column) {
  return static_cast<std::size_t>(row * kPathfinderSize + column);
}
bool inside(PathfinderPoint p) {
  return p.row >= 0 && p.column >= 0 && p.row < kPathfinderSize && p.column < kPathfinderSize;
}
void join_planes(PathfinderPlane& into, const PathfinderPlane& other) {
  for (std::size_t i = 0; i < into.size(); ++i) into[i] = std::max(into[i], other[i]);
}

// Calls visit(pixel, stamp value) for the part of a stamp that is in the picture.
template <class Visit>
void for_stamp(PathfinderPoint start, const std::array<float, kStampSize * kStampSize>& stamp,
               Visit visit) {
  for (int r = 0; r < kStampSize; ++r) {
    for (int c = 0; c < kStampSize; ++c) {
      const PathfinderPoint p{start.row + r - kStampRadius, start.column + c - kStampRadius};
      if (inside(p)) {
        visit(pixel_at(p.row, p.column), stamp[static_cast<std::size_t>(r * kStampSize + c)]);
      }
    }
  }
}

double opposite(double angle) {
  return angle < 0 ? angle + std::numbers::pi : angle - std::numbers::pi;
}

// The pixels of the circle on which dashes end, relative to the joint, in reading order.
struct CirclePixel {
  int row = 0;
  int column = 0;
  double angle = 0;
  double sine = 0;
  double cosine = 0;
  const DashStamp* dash = nullptr;  // from there back to the joint
};

std::vector<CirclePixel> make_circle() {
  constexpr double kRadius = kDashLength + kDashMargin;
  std::vector<CirclePixel> circle;
  for (int i = 0; i / kRadius < 2 * std::numbers::pi; ++i) {  // steps of one pixel's length
    const double angle = i / kRadius;
    const int row = static_cast<int>(std::floor(kRadius * std::sin(angle)));
    const int column = static_cast<int>(std::floor(kRadius * std::cos(angle)));
    const bool known = std::any_of(circle.begin(), circle.end(), [&](const CirclePixel& p) {
      return p.row == row && p.column == column;
    });
    if (known) continue;
    const double seen = std::atan2(row, column);
    circle.push_back(
        {row, column, seen, std::sin(seen), std::cos(seen), &dash_stamp(opposite(seen))});
  }
  std::sort(circle.begin(), circle.end(), [](const CirclePixel& a, const CirclePixel& b) {
    return a.row != b.row ? a.row < b.row : a.column < b.column;
  });
  return circle;
}

// A contour that grows: its last dash is drawn, but its place is still open.
struct GrowingContour {
  PathfinderPlane drawn{};
  const DashStamp* last_dash = nullptr;
  PathfinderPoint last_start;
  PathfinderPoint joint;
  double angle = 0;
  double sine = 0;
  double cosine = 0;
  PathfinderPoint first_end;
  PathfinderPoint last_end;
};

class PathfinderPainter {
 public:
  explicit PathfinderPainter(Random random) : random_(random) {}

  PathfinderPicture paint(const PathfinderShape& shape) {
    PathfinderPicture picture;
    std::array<GrowingContour, 2> contours;
    while (!grow_long(contours, shape.contour_length)) {
    }
    PathfinderPlane image = contours[0].drawn;
    join_planes(image, contours[1].drawn);
    widen_taken();
    for (std::int64_t i = 0; i < shape.distractors; ++i) {
      if (random_.chance(kShortShare)) grow_short(image, shape);
    }
    picture.label = random_.chance(0.5) ? 1 : 0;
    const std::size_t from = random_.below(std::uint64_t{2});
    const std::size_t to = picture.label == 1 ? from : 1 - from;
    picture.discs = {contours[from].first_end, contours[to].last_end};
    for (const PathfinderPoint disc : picture.discs) join_planes(image, draw_disc(disc));
    const float most = *std::max_element(image.begin(), image.end());
    for (std::size_t i = 0; i < image.size(); ++i) {
      picture.pixels[i] = static_cast<std::uint8_t>(image[i] / most * 255 + 0.5F);
    }
    for (std::size_t i = 0; i < 2; ++i) {
      picture.contours[i] = {contours[i].drawn, contours[i].first_end, contours[i].last_end};
    }
    return picture;
  }

 private:
  bool grow_long(std::array<GrowingContour, 2>& contours, std::int64_t length) {
    taken_.fill(0);
    close_frame(taken_, 1);
    const PathfinderPoint start = random_start();
    begin_at(contours[0], start, random_degrees(), kLongLight);
    const double turn = random_degrees();
    const auto nearest = [](double x) { return static_cast<int>(std::lround(x)); };
    begin_at(contours[1],
             {nearest(start.row + kStartDistance * std::sin(turn)),
              nearest(start.column + kStartDistance * std::cos(turn))},
             random_degrees(), kLongLight);
    for (std::int64_t i = 1; i < length; ++i) {
      for (GrowingContour& contour : contours) {
        if (!extend(contour, kLongLight)) return false;
      }
    }
    // The last dash of the first contour stays open, as in the published program.
    close_last(contours[1]);
    return true;
  }

  void grow_short(PathfinderPlane& image, const PathfinderShape& shape) {
    const PathfinderPlane before = taken_;
    GrowingContour contour;
    bool grown = begin(contour, kShortLight);
    for (std::int64_t i = 1; grown && i < shape.distractor_length; ++i) {
      grown = extend(contour, kShortLight);
    }
    if (!grown) {
      taken_ = before;
      return;
    }
    close_last(contour);
    join_planes(image, contour.drawn);
  }

  PathfinderPoint random_start() {
    std::int64_t left = random_.below(kStartSum);
    std::size_t i = 0;
    while (left >= kStarts[i]) left -= kStarts[i++];
    return {kFirstStart + static_cast<int>(i) / 3, kFirstStart + static_cast<int>(i) % 3};
  }

  static void close_frame(PathfinderPlane& plane, int width) {
    for (int row = 0; row < kPathfinderSize; ++row) {
      for (int column = 0; column < kPathfinderSize; ++column) {
        const int edge =
            std::min(std::min(row, column), kPathfinderSize - 1 - std::max(row, column));
        if (edge < width) plane[pixel_at(row, column)] = 1;
      }
    }
  }

  double random_degrees() {
    return static_cast<double>(random_.between(-180, 179)) * std::numbers::pi / 180;
  }

  // A first dash somewhere in what is free.
  bool begin(GrowingContour& contour, double light) {
    for (int tries = 0; tries < kDashTries; ++tries) {
      const double angle = random_degrees();
      const std::vector<PathfinderPoint> places = free_places(dash_stamp(angle));
      if (places.empty()) return false;
      const PathfinderPoint start = places[random_.below(std::uint64_t{places.size()})];
      if (begin_at(contour, start, angle, light)) return true;
    }
    return false;
  }

  // False where the dash would leave the picture.
  static bool begin_at(GrowingContour& contour, PathfinderPoint start, double angle, double light) {
    const PathfinderPoint head = point_along(start, angle, kDashLength);
    contour.joint = point_along(head, opposite(angle), kDashLength + kDashMargin);
    if (!inside(start) || !inside(head) || !inside(contour.joint)) return false;
    contour.drawn.fill(0);
    contour.angle = angle;
    contour.sine = std::sin(angle);
    contour.cosine = std::cos(angle);
    contour.first_end = start;
    contour.last_end = head;
    stamp_dash(contour, start, dash_stamp(angle), light);
    return true;
  }

  static void stamp_dash(GrowingContour& contour, PathfinderPoint start, const DashStamp& stamp,
                         double light) {
    contour.last_dash = &stamp;
    contour.last_start = start;
    for_stamp(start, stamp.light, [&](std::size_t i, float value) {
      contour.drawn[i] = std::max(contour.drawn[i], value * static_cast<float>(light));
    });
  }

  void close_last(const GrowingContour& contour) {
    for_stamp(contour.last_start, contour.last_dash->place,
              [&](std::size_t i, float value) { taken_[i] = std::max(taken_[i], value); });
  }

  // Starts from which a dash with its margin touches nothing. What is asked lies one pixel down and
  // right of the dash, as in the published program.
  std::vector<PathfinderPoint> free_places(const DashStamp& stamp) const {
    constexpr int kReach = kDashLength + kDashMargin;
    std::vector<PathfinderPoint> needed;
    for (int r = -kReach; r <= kReach; ++r) {
      for (int c = -kReach; c <= kReach; ++c) {
        const int row = r - 1 + kStampRadius;
        const int column = c - 1 + kStampRadius;
        if (stamp.place[static_cast<std::size_t>(row * kStampSize + column)] >= 1) {
          needed.push_back({r, c});
        }
      }
    }
    std::vector<PathfinderPoint> places;
    for (int row = 0; row < kPathfinderSize; ++row) {
      for (int column = 0; column < kPathfinderSize; ++column) {
        const bool free = std::all_of(needed.begin(), needed.end(), [&](PathfinderPoint d) {
          const PathfinderPoint p{row + d.row, column + d.column};
          return !inside(p) || taken_[pixel_at(p.row, p.column)] <= kFree;
        });
        if (free) places.push_back({row, column});
      }
    }
    return places;
  }

  // One more dash; false where there is no room.
  bool extend(GrowingContour& contour, double light) {
    static const std::vector<CirclePixel> circle = make_circle();
    const PathfinderPoint joint =
        point_along(contour.joint, contour.angle, kDashLength + 2 * kDashMargin);
    std::array<double, 20> sums{};  // a circle of radius 3 has 18 pixels
    double sum = 0;
    for (std::size_t i = 0; i < circle.size(); ++i) {
      const PathfinderPoint p{joint.row + circle[i].row, joint.column + circle[i].column};
      // Of the turn; beyond a right angle there is none.
      const double cosine = contour.cosine * circle[i].cosine + contour.sine * circle[i].sine;
      if (cosine > 0 && inside(p)) sum += cosine * cosine * (1 - taken_near(p));
      sums[i] = sum;
    }
    if (sum < 1e-4) return false;
    for (int tries = 0; tries < kDashTries; ++tries) {
      const double drawn = random_.uniform() * sum;
      std::size_t which = 0;
      while (which + 1 < circle.size() && sums[which] <= drawn) ++which;
      const CirclePixel& pixel = circle[which];
      const PathfinderPoint head{joint.row + pixel.row, joint.column + pixel.column};
      bool crosses = false;
      for_stamp(head, pixel.dash->place, [&](std::size_t i, float value) {
        crosses = crosses || taken_[i] + value >= kCrossing;
      });
      if (crosses) continue;
      close_last(contour);
      contour.joint = joint;
      contour.angle = pixel.angle;
      contour.sine = pixel.sine;
      contour.cosine = pixel.cosine;
      contour.last_end = head;
      stamp_dash(contour, head, *pixel.dash, light);
      return true;
    }
    return false;
  }

  void widen_taken() {
    PathfinderPlane frame{};
    close_frame(frame, 1);
    PathfinderPlane wider = taken_;
    for (std::size_t i = 0; i < taken_.size(); ++i) taken_[i] -= frame[i];
    for (int row = 0; row < kPathfinderSize; ++row) {
      for (int column = 0; column < kPathfinderSize; ++column) {
        float& pixel = wider[pixel_at(row, column)];
        pixel = std::max(pixel, taken_near({row, column}));
      }
    }
    taken_ = wider;
  }

  // How much a pixel or one beside it is taken.
  float taken_near(PathfinderPoint p) const {
    float most = 0;
    for (const auto& [row, column] : {std::pair{0, 0}, {-1, 0}, {1, 0}, {0, -1}, {0, 1}}) {
      const PathfinderPoint q{p.row + row, p.column + column};
      if (inside(q)) most = std::max(most, taken_[pixel_at(q.row, q.column)]);
    }
    return most;
  }

  Random random_;
  PathfinderPlane taken_{};  // 0 .. 1
};

}  // namespace

PathfinderPicture make_pathfinder(Random random, const PathfinderShape& shape) {
  return PathfinderPainter(random).paint(shape);
}

}  // namespace lln_torch
