// Examples as people read them: ids as text, pictures as characters or files, labels by name.
// People look at their data before they train on them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lln_torch/data/batch.h"
#include "lln_torch/data/tokenizer.h"

namespace lln_torch {

// A picture of one row: [channels, height, width], each channel 0 .. 255.
struct PreviewPicture {
  std::int64_t channels = 0;
  std::int64_t height = 0;
  std::int64_t width = 0;
  std::vector<std::uint8_t> bytes;
};

struct PreviewRow {
  std::int64_t tokens = 0;  // that count; 0 of pixels
  std::string text;         // empty where the row is a picture
  std::string second;       // of two texts
  std::string label;        // the class by name, the score, or the labelled places
  PreviewPicture picture;   // none: channels 0
};

// Row `row` of a batch. Ids of 256 values in a square number are taken for a grey picture.
PreviewRow preview_row(const Task& task, const Batch& batch, std::int64_t row);

// Lines of characters from dark to bright, at most `columns` wide, twice as wide as high.
std::string picture_as_text(const PreviewPicture& picture, std::int64_t columns = 64);

// The bytes of a .pgm (one channel) or .ppm file (three).
std::string picture_as_pnm(const PreviewPicture& picture);

// Text with special tokens by name, [MASK] among them; padding is left out. What tasks put into
// Task::text_of_ids.
std::string readable_ids(const Tokenizer& tokenizer, std::span<const std::int32_t> ids);
std::function<std::string(std::span<const std::int32_t>)> text_by(
    std::shared_ptr<const Tokenizer> tokenizer);

}  // namespace lln_torch
