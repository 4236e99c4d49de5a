// Pictures in other sizes: a separable filter, stretched where a picture shrinks so that every
// pixel counts (antialiasing, as Pillow and torchvision do it).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

namespace lln_torch {

enum class Filter : std::uint8_t { triangle, lanczos3 };

// For every new pixel: which old ones it is made of, and their weights, which sum to 1.
struct ResampleWeights {
  struct Pixel {
    std::int64_t first = 0;
    std::vector<float> weights;
  };
  std::vector<Pixel> pixels;  // [new size]
};

// The part start .. start + length of `old_size` pixels, in pixels and fractions, to new_size.
ResampleWeights resample_weights(std::int64_t old_size, double start, double length,
                                 std::int64_t new_size, Filter filter);

}  // namespace lln_torch
