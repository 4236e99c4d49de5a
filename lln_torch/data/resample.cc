// Weights of resampling. A pixel's centre is at its number + 1/2, in both sizes.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/resample.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace lln_torch {
namespace {

double filter_support(Filter filter) { return filter == Filter::triangle ? 1 : 3; }

double filter_value(Filter filter, double x) {
  x = std::abs(x);
  if (filter == Filter::triangle) return std::max(0.0, 1 - x);
  if (x >= 3) return 0;
  if (x < 1e-12) return 1;
  const double a = std::numbers::pi * x;
  return std::sin(a) / a * std::sin(a / 3) / (a / 3);
}

}  // namespace

ResampleWeights resample_weights(std::int64_t old_size, double start, double length,
                                 std::int64_t new_size, Filter filter) {
  ResampleWeights result;
  const double scale = length / static_cast<double>(new_size);
  const double stretch = std::max(scale, 1.0);
  const double support = filter_support(filter) * stretch;
  for (std::int64_t i = 0; i < new_size; ++i) {
    const double centre = start + (static_cast<double>(i) + 0.5) * scale;
    const auto first = std::clamp<std::int64_t>(
        static_cast<std::int64_t>(std::floor(centre - support + 0.5)), 0, old_size - 1);
    const auto end = std::clamp<std::int64_t>(
        static_cast<std::int64_t>(std::floor(centre + support + 0.5)), first + 1, old_size);
    ResampleWeights::Pixel pixel{first, {}};
    double sum = 0;
    for (std::int64_t j = first; j < end; ++j) {
      const double weight = filter_value(filter, (static_cast<double>(j) + 0.5 - centre) / stretch);
      pixel.weights.push_back(static_cast<float>(weight));
      sum += weight;
    }
    if (sum <= 0) {  // a single pixel at the very edge of the filter
      pixel.weights.assign(pixel.weights.size(), 1);
      sum = static_cast<double>(pixel.weights.size());
    }
    for (float& weight : pixel.weights) weight = static_cast<float>(weight / sum);
    result.pixels.push_back(std::move(pixel));
  }
  return result;
}

}  // namespace lln_torch
