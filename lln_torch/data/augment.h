// From a decoded picture to the pixels of an example: a part of it, resampled to a square, flipped,
// its colours changed, normalised. What is random is drawn from one row's numbers, so that a batch
// is the same whenever it is asked for.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "lln_torch/config/settings.h"
#include "lln_torch/data/jpeg.h"
#include "lln_torch/data/random.h"

namespace lln_torch {

// The table [data.augment]. Everything off: `enabled = false`.
struct Augmentation {
  bool enabled = true;
  double smallest_crop = 0.5;  // share of the area; the aspect ratio is 3/4 to 4/3
  bool flip = true;            // left and right, every second time
  double brightness = 0.2;     // factors of 1 - x to 1 + x
  double contrast = 0.2;
  double saturation = 0.2;

  static Augmentation from_settings(const Settings& augment);
};

// One picture's share of chance.
struct View {
  double top = 0;
  double left = 0;
  double height = 0;
  double width = 0;
  bool flipped = false;
  double brightness = 1;
  double contrast = 1;
  double saturation = 1;
};

View random_view(const Augmentation& augmentation, std::int64_t height, std::int64_t width,
                 Random random);
// The largest square in the middle, or one with this share of its side.
View middle_view(std::int64_t height, std::int64_t width, double share = 1);

struct Normalisation {
  double mean = 0.5;  // of values 0 .. 1
  double deviation = 0.5;
};

// Writes [channels, size, size].
void draw_view(const Picture& picture, const View& view, std::int64_t size,
               const Normalisation& normalisation, std::span<float> pixels);

}  // namespace lln_torch
