// One row after another: what kind it is decides how it is shown.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/preview.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>

namespace lln_torch {
namespace {

constexpr std::string_view kShades = " .:-=+*#%@";  // from dark to bright
constexpr std::int64_t kShownPlaces = 12;

std::string numbers(std::span<const std::int32_t> ids) {
  std::string text;
  for (const std::int32_t id : ids) text += fmt::format("{}{}", text.empty() ? "" : " ", id);
  return text;
}

std::string text_of(const Task& task, std::span<const std::int32_t> ids) {
  return task.text_of_ids ? task.text_of_ids(ids) : numbers(ids);
}

// The ids of a row that count.
std::vector<std::int32_t> counted_ids(const TextRows& text, std::int64_t row) {
  std::vector<std::int32_t> ids;
  for (std::int64_t i = row * text.tokens; i < (row + 1) * text.tokens; ++i) {
    const auto at = static_cast<std::size_t>(i);
    if (text.mask.empty() || text.mask[at] != 0) ids.push_back(text.ids[at]);
  }
  return ids;
}

std::int64_t square_side(std::size_t size) {
  const auto side = static_cast<std::int64_t>(std::llround(std::sqrt(static_cast<double>(size))));
  return static_cast<std::size_t>(side * side) == size ? side : 0;
}

// Brightness is stretched: how pixels were normalised is the task's own business.
PreviewPicture picture_of_pixels(const Task& task, const Batch& batch, std::int64_t row) {
  PreviewPicture picture{task.channels, task.height, task.width, {}};
  const auto size = static_cast<std::size_t>(task.channels * task.height * task.width);
  const auto pixels = std::span(batch.pixels).subspan(static_cast<std::size_t>(row) * size, size);
  const auto [least, most] = std::minmax_element(pixels.begin(), pixels.end());
  const float range = std::max(*most - *least, 1e-6F);
  for (const float x : pixels) {
    picture.bytes.push_back(static_cast<std::uint8_t>((x - *least) / range * 255 + 0.5F));
  }
  return picture;
}

std::string class_name(const Task& task, std::int32_t label) {
  if (label < 0 || static_cast<std::size_t>(label) >= task.class_names.size()) {
    return std::to_string(label);
  }
  const std::string& name = task.class_names[static_cast<std::size_t>(label)];
  return name == std::to_string(label) ? name : fmt::format("{} ({})", name, label);
}

// Of masked and following tokens: which place asks for what.
std::string labelled_places(const Task& task, const Batch& batch, std::int64_t row) {
  std::string text;
  std::int64_t places = 0;
  for (std::int64_t i = 0; i < batch.text.tokens; ++i) {
    const std::int32_t label = batch.labels[static_cast<std::size_t>(row * batch.text.tokens + i)];
    if (label == kIgnoredLabel || ++places > kShownPlaces) continue;
    text +=
        fmt::format("{}{}: {}", text.empty() ? "" : ", ", i, text_of(task, std::span(&label, 1)));
  }
  if (places > kShownPlaces) text += fmt::format(", and {} more", places - kShownPlaces);
  return text;
}

std::string label_of(const Task& task, const Batch& batch, std::int64_t row) {
  if (task.kind == TaskKind::masked_tokens || task.kind == TaskKind::next_token) {
    return labelled_places(task, batch, row);
  }
  const auto at = static_cast<std::size_t>(row);
  if (at < batch.scores.size()) return fmt::format("{:g}", batch.scores[at]);
  return at < batch.labels.size() ? class_name(task, batch.labels[at]) : "";
}

}  // namespace

PreviewRow preview_row(const Task& task, const Batch& batch, std::int64_t row) {
  PreviewRow shown;
  shown.label = label_of(task, batch, row);
  if (!batch.pixels.empty()) {
    shown.picture = picture_of_pixels(task, batch, row);
    return shown;
  }
  const std::vector<std::int32_t> ids = counted_ids(batch.text, row);
  shown.tokens = static_cast<std::int64_t>(ids.size());
  const std::int64_t side = square_side(ids.size());
  if (task.vocabulary == 256 && !task.text_of_ids && side > 1) {
    shown.picture = {1, side, side, {}};
    for (const std::int32_t id : ids) {
      shown.picture.bytes.push_back(static_cast<std::uint8_t>(id));
    }
    return shown;
  }
  shown.text = text_of(task, ids);
  if (!batch.second.ids.empty()) shown.second = text_of(task, counted_ids(batch.second, row));
  return shown;
}

std::string picture_as_text(const PreviewPicture& picture, std::int64_t columns) {
  // A character is about twice as high as wide, so a pixel takes two of them.
  const std::int64_t wide = std::min(columns / 2, picture.width);
  const std::int64_t high = std::max<std::int64_t>(1, picture.height * wide / picture.width);
  std::string text;
  for (std::int64_t row = 0; row < high; ++row) {
    std::string line;
    for (std::int64_t column = 0; column < wide; ++column) {
      std::int64_t sum = 0;
      std::int64_t count = 0;
      for (std::int64_t y = row * picture.height / high; y < (row + 1) * picture.height / high;
           ++y) {
        for (std::int64_t x = column * picture.width / wide;
             x < (column + 1) * picture.width / wide; ++x) {
          for (std::int64_t c = 0; c < picture.channels; ++c, ++count) {
            sum +=
                picture
                    .bytes[static_cast<std::size_t>((c * picture.height + y) * picture.width + x)];
          }
        }
      }
      const auto shade =
          static_cast<std::size_t>(sum / std::max<std::int64_t>(count, 1)) * kShades.size() / 256;
      line.append(2, kShades[shade]);
    }
    text += line.substr(0, line.find_last_not_of(' ') + 1) + "\n";
  }
  return text;
}

std::string picture_as_pnm(const PreviewPicture& picture) {
  std::string file = fmt::format("{}\n{} {}\n255\n", picture.channels == 3 ? "P6" : "P5",
                                 picture.width, picture.height);
  for (std::int64_t i = 0; i < picture.height * picture.width; ++i) {
    for (std::int64_t c = 0; c < (picture.channels == 3 ? 3 : 1); ++c) {
      file += static_cast<char>(
          picture.bytes[static_cast<std::size_t>(c * picture.height * picture.width + i)]);
    }
  }
  return file;
}

std::string readable_ids(const Tokenizer& tokenizer, std::span<const std::int32_t> ids) {
  const SpecialTokens& special = tokenizer.special();
  const auto name = [&](std::int32_t id) {
    return id == special.start       ? "[CLS]"
           : id == special.separator ? "[SEP]"
           : id == special.mask      ? "[MASK]"
           : id == special.unknown   ? "[UNK]"
                                     : "";
  };
  std::string text;
  for (std::size_t i = 0; i < ids.size();) {
    std::size_t end = i;
    while (end < ids.size() && !special.contains(ids[end])) ++end;
    std::string part = end > i ? tokenizer.decode(ids.subspan(i, end - i)) : name(ids[i]);
    if (!text.empty() && !part.empty()) text += ' ';
    text += part;
    i = std::max(end, i + 1);
  }
  return text;
}

std::function<std::string(std::span<const std::int32_t>)> text_by(
    std::shared_ptr<const Tokenizer> tokenizer) {
  return [tokenizer = std::move(tokenizer)](std::span<const std::int32_t> ids) {
    return readable_ids(*tokenizer, ids);
  };
}

}  // namespace lln_torch
