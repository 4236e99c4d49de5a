// Grey pictures of 32 x 32 bytes as examples: a sequence of 1,024 ids, one for each pixel (the Long
// Range Arena's "Image" and "Pathfinder"), or pixels for models that cut patches.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>

#include "lln_torch/config/settings.h"
#include "lln_torch/data/batch.h"

namespace lln_torch {

constexpr std::int64_t kGreySide = 32;
constexpr std::int64_t kGreyPixels = kGreySide * kGreySide;

struct GreyForm {
  bool ids = true;
  // Pixels are (byte / 255 - mean) / deviation.
  double mean = 0.5;
  double deviation = 0.5;

  // The keys `form` ("ids" or "pixels"), `mean` and `deviation`.
  static GreyForm from_settings(const Settings& data);
  // What the form says of a task: vocabulary and tokens, or channels, height and width.
  void describe(Task& task) const;
  void append(std::span<const std::uint8_t> picture, Batch& batch) const;
};

}  // namespace lln_torch
