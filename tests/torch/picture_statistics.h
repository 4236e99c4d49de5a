// What a set of 32 x 32 grey pictures looks like in numbers, to compare two of them: brightness,
// lit pixels, connected pieces, where the light is. Used by the test of Pathfinder and by the
// program that compares it with a file of records (a label byte and 1,024 bytes each).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

namespace lln_torch::test {

constexpr int kSide = 32;
constexpr std::uint8_t kLit = 20;  // ringing around the dashes stays below

// Pieces of lit pixels that touch, by corners too.
inline int connected_pieces(std::span<const std::uint8_t> pixels) {
  std::array<bool, kSide * kSide> seen{};
  int pieces = 0;
  for (int start = 0; start < kSide * kSide; ++start) {
    const auto at = static_cast<std::size_t>(start);
    if (seen[at] || pixels[at] <= kLit) continue;
    ++pieces;
    std::vector<int> open = {start};
    seen[at] = true;
    while (!open.empty()) {
      const int pixel = open.back();
      open.pop_back();
      for (int r = -1; r <= 1; ++r) {
        for (int c = -1; c <= 1; ++c) {
          const int row = pixel / kSide + r;
          const int column = pixel % kSide + c;
          if (row < 0 || column < 0 || row >= kSide || column >= kSide) continue;
          const auto next = static_cast<std::size_t>(row * kSide + column);
          if (seen[next] || pixels[next] <= kLit) continue;
          seen[next] = true;
          open.push_back(row * kSide + column);
        }
      }
    }
  }
  return pieces;
}

class PictureStatistics {
 public:
  void add(std::uint8_t label, std::span<const std::uint8_t> pixels) {
    ++count_;
    positive_ += label;
    double sum = 0;
    int lit = 0;
    int bright = 0;
    for (int i = 0; i < kSide * kSide; ++i) {
      const double x = pixels[static_cast<std::size_t>(i)];
      sum += x;
      squares_ += x * x;
      lit += x > kLit;
      bright += x > 128;
      ++histogram_[pixels[static_cast<std::size_t>(i)]];
      rows_[static_cast<std::size_t>(i / kSide)] += x;
      columns_[static_cast<std::size_t>(i % kSide)] += x;
      const double distance = std::hypot(i / kSide - 15.5, i % kSide - 15.5);
      const auto ring = static_cast<std::size_t>(distance / 2);
      rings_[ring] += x;
      ring_pixels_[ring] += 1;
    }
    sum_ += sum / (kSide * kSide);
    sum_squares_ += sum / (kSide * kSide) * sum / (kSide * kSide);
    lit_ += lit;
    bright_ += bright;
    pieces_ += connected_pieces(pixels);
  }

  double count() const { return count_; }
  double positive() const { return positive_ / count_; }
  double mean() const { return sum_ / count_; }
  double deviation() const {
    return std::sqrt(squares_ / (count_ * kSide * kSide) - mean() * mean());
  }
  double deviation_of_means() const { return std::sqrt(sum_squares_ / count_ - mean() * mean()); }
  double lit() const { return lit_ / count_; }
  double bright() const { return bright_ / count_; }
  double pieces() const { return pieces_ / count_; }
  double row(std::size_t i) const { return rows_[i] / (count_ * kSide); }
  double column(std::size_t i) const { return columns_[i] / (count_ * kSide); }
  double ring(std::size_t i) const { return rings_[i] / ring_pixels_[i]; }  // 2 pixels wide
  static constexpr std::size_t kRings = 11;
  double value_share(std::size_t value) const {
    return histogram_[value] / (count_ * kSide * kSide);
  }

 private:
  double count_ = 0;
  double positive_ = 0;
  double sum_ = 0;
  double sum_squares_ = 0;
  double squares_ = 0;
  double lit_ = 0;
  double bright_ = 0;
  double pieces_ = 0;
  std::array<double, kSide> rows_{};
  std::array<double, kSide> columns_{};
  std::array<double, kRings> rings_{};
  std::array<double, kRings> ring_pixels_{};
  std::array<double, 256> histogram_{};
};

}  // namespace lln_torch::test
