// Batches of encoded examples, padded to the longest row.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/text_examples.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>

#include "lln_torch/config/settings.h"
#include "lln_torch/data/metrics.h"
#include "lln_torch/data/text_sources.h"

namespace lln_torch {
namespace {

// Widths of batches are multiples of this, so that not every batch is a shape of its own.
constexpr std::int64_t kWidthUnit = 8;

class ExampleSource final : public Source {
 public:
  ExampleSource(Task task, TextExamples train, TextExamples validation,
                const TextSourceOptions& options)
      : task_(std::move(task)),
        train_(std::move(train)),
        validation_(std::move(validation)),
        order_(options.seed, train_.ids.rows()),
        fixed_length_(options.fixed_length) {}

  const Task& task() const override { return task_; }
  std::int64_t validation_rows() const override { return validation_.ids.rows(); }
  double steps_per_epoch(std::int64_t batch_rows) const override {
    return order_.steps_per_epoch(batch_rows);
  }

  Batch train_batch(std::int64_t step, std::int64_t batch_rows, std::int64_t first,
                    std::int64_t rows) const override {
    std::vector<std::int64_t> examples;
    for (const OrderedRow& row : order_.rows(step, batch_rows, first, rows)) {
      examples.push_back(row.example);
    }
    return gather(train_, examples);
  }

  Batch validation_batch(std::int64_t first, std::int64_t rows) const override {
    return gather(validation_, validation_examples(first, rows, validation_rows()));
  }

 private:
  Batch gather(const TextExamples& from, const std::vector<std::int64_t>& examples) const {
    Batch batch;
    batch.rows = static_cast<std::int64_t>(examples.size());
    batch.text = padded(from.ids, examples);
    bool pairs = false;
    for (const std::int64_t example : examples) {
      const auto at = static_cast<std::size_t>(example);
      pairs = pairs || from.first_segments[at] < from.ids.tokens(example);
      if (task_.kind == TaskKind::score || task_.kind == TaskKind::embedding) {
        batch.scores.push_back(from.scores[at]);
      } else {
        batch.labels.push_back(from.labels[at]);
      }
    }
    if (from.second.rows() > 0) batch.second = padded(from.second, examples);
    if (pairs) mark_segments(from, examples, batch.text);
    return batch;
  }

  TextRows padded(const IdRows& from, const std::vector<std::int64_t>& examples) const {
    std::int64_t longest = 1, shortest = task_.max_tokens;
    for (const std::int64_t example : examples) {
      longest = std::max(longest, from.tokens(example));
      shortest = std::min(shortest, from.tokens(example));
    }
    const std::int64_t rounded = (longest + kWidthUnit - 1) / kWidthUnit * kWidthUnit;
    const std::int64_t width =
        fixed_length_ ? task_.max_tokens : std::min(rounded, std::max(task_.max_tokens, longest));
    TextRows text;
    text.tokens = width;
    const auto size = examples.size() * static_cast<std::size_t>(width);
    text.ids.assign(size, static_cast<std::int32_t>(task_.pad_id));
    if (shortest < width) text.mask.assign(size, 0);
    for (std::size_t r = 0; r < examples.size(); ++r) {
      const std::int64_t first = static_cast<std::int64_t>(r) * width;
      from.copy(examples[r], text.ids.data() + first);
      if (!text.mask.empty()) {
        std::fill_n(text.mask.begin() + first, from.tokens(examples[r]), 1);
      }
    }
    return text;
  }

  static void mark_segments(const TextExamples& from, const std::vector<std::int64_t>& examples,
                            TextRows& text) {
    text.segments.assign(text.ids.size(), 0);
    for (std::size_t r = 0; r < examples.size(); ++r) {
      const auto row = text.segments.begin() + static_cast<std::int64_t>(r) * text.tokens;
      std::fill(row + from.first_segments[static_cast<std::size_t>(examples[r])],
                row + from.ids.tokens(examples[r]), 1);
    }
  }

  Task task_;
  TextExamples train_;
  TextExamples validation_;
  ExampleOrder order_;
  bool fixed_length_;
};

}  // namespace

void IdRows::add(std::span<const std::int32_t> ids) {
  if (narrow_) {
    for (const std::int32_t id : ids) ids16_.push_back(static_cast<std::uint16_t>(id));
  } else {
    ids32_.insert(ids32_.end(), ids.begin(), ids.end());
  }
  ends_.push_back(ends_.back() + static_cast<std::int64_t>(ids.size()));
}

void IdRows::copy(std::int64_t row, std::int32_t* into) const {
  if (narrow_) {
    std::copy(ids16_.begin() + end(row), ids16_.begin() + end(row + 1), into);
  } else {
    std::copy(ids32_.begin() + end(row), ids32_.begin() + end(row + 1), into);
  }
}

void TextExamples::add(const EncodedRow& row, std::int32_t label, float score) {
  ids.add(row.ids);
  first_segments.push_back(static_cast<std::int32_t>(row.first_segment));
  labels.push_back(label);
  scores.push_back(score);
}

void set_class_chance(Task& task, const TextExamples& validation) {
  std::map<std::int32_t, std::int64_t> counts;
  for (const std::int32_t label : validation.labels) ++counts[label];
  const auto most =
      std::max_element(counts.begin(), counts.end(),
                       [](const auto& a, const auto& b) { return a.second < b.second; });
  const std::vector<std::int32_t> constant(validation.labels.size(), most->first);
  task.chance = class_metric(task.metrics.front(), constant, validation.labels);
  task.chance_text = fmt::format("{} of always class {}, the most frequent of the validation set",
                                 task.metrics.front(), most->first);
}

std::unique_ptr<Source> make_example_source(Task task, TextExamples train, TextExamples validation,
                                            const TextSourceOptions& options) {
  return std::make_unique<ExampleSource>(std::move(task), std::move(train), std::move(validation),
                                         options);
}

TextSourceOptions text_source_options(const Settings& data) {
  return {.seed = data_seed(data), .fixed_length = data.flag("fixed_length", false)};
}

std::uint64_t data_seed(const Settings& data) {
  return static_cast<std::uint64_t>(data.integer("seed", 0, 0, INT64_MAX));
}

std::unique_ptr<Tokenizer> data_tokenizer(const Settings& data, const std::string& folder) {
  const std::string name = data.required_text("tokenizer");
  if (name == "bytes") return byte_tokenizer();
  std::error_code ignored;
  if (std::filesystem::exists(name, ignored)) return load_tokenizer(name);
  return load_tokenizer((std::filesystem::path(folder) / name).string());
}

}  // namespace lln_torch
