// Bytes to ids or to numbers.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/grey_pictures.h"

namespace lln_torch {

GreyForm GreyForm::from_settings(const Settings& data) {
  GreyForm form;
  form.ids = data.choice("form", "ids", {"ids", "pixels"}) == "ids";
  if (!form.ids) {
    form.mean = data.number("mean", form.mean, 0, 1);
    form.deviation = data.number("deviation", form.deviation, 1e-3, 1e3);
  }
  return form;
}

void GreyForm::describe(Task& task) const {
  task.max_tokens = kGreyPixels;
  if (ids) {
    task.vocabulary = 256;
  } else {
    task.channels = 1;
    task.height = kGreySide;
    task.width = kGreySide;
  }
}

void GreyForm::append(std::span<const std::uint8_t> picture, Batch& batch) const {
  ++batch.rows;
  if (ids) {
    batch.text.tokens = kGreyPixels;
    batch.text.ids.insert(batch.text.ids.end(), picture.begin(), picture.end());
    return;
  }
  for (const std::uint8_t byte : picture) {
    batch.pixels.push_back(static_cast<float>((byte / 255.0 - mean) / deviation));
  }
}

}  // namespace lln_torch
