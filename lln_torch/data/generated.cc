// The source that all generated tasks share, and how rows are padded and classes counted.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/generated.h"

#include <fmt/format.h>

#include <algorithm>

#include "lln_torch/data/example_order.h"

namespace lln_torch {
namespace {

constexpr std::int64_t kMostGeneratedRows = std::int64_t{1} << 40;

class GeneratedSource final : public Source {
 public:
  GeneratedSource(Task task, const GeneratedSplits& splits, MakeExamples make)
      : task_(std::move(task)),
        splits_(splits),
        make_(std::move(make)),
        order_(splits.seed, splits.train_rows) {}

  const Task& task() const override { return task_; }
  Batch train_batch(std::int64_t step, std::int64_t batch_rows, std::int64_t first,
                    std::int64_t rows) const override {
    std::vector<std::int64_t> indices;
    for (const OrderedRow& row : order_.rows(step, batch_rows, first, rows)) {
      indices.push_back(row.example);
    }
    return make_(Split::train, indices);
  }
  std::int64_t validation_rows() const override { return splits_.held_out_rows; }
  Batch validation_batch(std::int64_t first, std::int64_t rows) const override {
    return make_(splits_.held_out, validation_examples(first, rows, splits_.held_out_rows));
  }
  double steps_per_epoch(std::int64_t batch_rows) const override {
    return order_.steps_per_epoch(batch_rows);
  }

 private:
  Task task_;
  GeneratedSplits splits_;
  MakeExamples make_;
  ExampleOrder order_;
};

}  // namespace

GeneratedSplits GeneratedSplits::from_settings(const Settings& data, std::int64_t train_rows,
                                               std::int64_t validation_rows,
                                               std::int64_t test_rows) {
  GeneratedSplits splits;
  splits.seed = static_cast<std::uint64_t>(data.integer("seed", 0, 0, INT64_MAX));
  splits.train_rows = data.integer("train_rows", train_rows, 1, kMostGeneratedRows);
  validation_rows = data.integer("validation_rows", validation_rows, 1, kMostGeneratedRows);
  test_rows = data.integer("test_rows", test_rows, 1, kMostGeneratedRows);
  const bool test = data.choice("validation_split", "validation", {"validation", "test"}) == "test";
  splits.held_out = test ? Split::test : Split::validation;
  splits.held_out_rows = test ? test_rows : validation_rows;
  return splits;
}

std::unique_ptr<Source> make_generated_source(Task task, const GeneratedSplits& splits,
                                              MakeExamples make) {
  return std::make_unique<GeneratedSource>(std::move(task), splits, std::move(make));
}

TextRows padded_rows(const std::vector<std::vector<std::int32_t>>& rows, const PaddedWidth& padded,
                     std::int32_t pad_id) {
  TextRows text;
  bool even = true;
  for (const auto& row : rows) {
    text.tokens = std::max(text.tokens, static_cast<std::int64_t>(row.size()));
  }
  const std::int64_t rounded = (text.tokens + padded.unit - 1) / padded.unit * padded.unit;
  text.tokens = padded.fixed ? padded.most : std::min(rounded, padded.most);
  const auto width = static_cast<std::size_t>(text.tokens);
  text.ids.assign(rows.size() * width, pad_id);
  text.mask.assign(rows.size() * width, 0);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::copy(rows[i].begin(), rows[i].end(), text.ids.begin() + static_cast<long>(i * width));
    std::fill_n(text.mask.begin() + static_cast<long>(i * width), rows[i].size(), 1);
    even = even && rows[i].size() == width;
  }
  if (even) text.mask.clear();
  return text;
}

ClassBalance class_balance(const std::vector<std::int32_t>& labels, std::int64_t classes,
                           const std::vector<std::string>& names) {
  std::vector<std::int64_t> counts(static_cast<std::size_t>(classes), 0);
  for (const std::int32_t label : labels) ++counts[static_cast<std::size_t>(label)];
  const auto name = [&](std::size_t i) { return names.empty() ? std::to_string(i) : names[i]; };
  const auto share = [&](std::size_t i) {
    return static_cast<double>(counts[i]) /
           static_cast<double>(std::max<std::size_t>(labels.size(), 1));
  };
  const auto most =
      static_cast<std::size_t>(std::max_element(counts.begin(), counts.end()) - counts.begin());
  std::string all;
  constexpr std::size_t kShown = 20;  // a thousand classes of pictures would fill the screen
  for (std::size_t i = 0; i < std::min(counts.size(), kShown); ++i) {
    all += fmt::format("{}{} {:.1f}%", i == 0 ? "" : ", ", name(i), 100 * share(i));
  }
  if (counts.size() > kShown) all += fmt::format(", and {} more", counts.size() - kShown);
  return {share(most), fmt::format("always class {}: {:.1f}% of {} rows ({})", name(most),
                                   100 * share(most), labels.size(), all)};
}

}  // namespace lln_torch
