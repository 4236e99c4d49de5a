// Texts with labels or scores, encoded once and kept in memory: what the sources of classification
// tasks show, row by row, in an order of its own for every epoch.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "lln_torch/data/batch.h"
#include "lln_torch/data/example_order.h"
#include "lln_torch/data/tokenizer.h"

namespace lln_torch {

// Rows of ids, two bytes each where the vocabulary allows it.
class IdRows {
 public:
  explicit IdRows(std::int64_t vocabulary) : narrow_(vocabulary <= 65536) {}
  void add(std::span<const std::int32_t> ids);
  std::int64_t rows() const { return static_cast<std::int64_t>(ends_.size()) - 1; }
  std::int64_t tokens(std::int64_t row) const { return end(row + 1) - end(row); }
  void copy(std::int64_t row, std::int32_t* into) const;

 private:
  std::int64_t end(std::int64_t row) const { return ends_[static_cast<std::size_t>(row)]; }

  bool narrow_;
  std::vector<std::uint16_t> ids16_;
  std::vector<std::int32_t> ids32_;
  std::vector<std::int64_t> ends_ = {0};
};

struct TextExamples {
  explicit TextExamples(std::int64_t vocabulary) : ids(vocabulary), second(vocabulary) {}
  void add(const EncodedRow& row, std::int32_t label, float score);

  IdRows ids;
  IdRows second;  // of pairs in rows of their own (matched_pair, embedding), otherwise without rows
  std::vector<std::int32_t> first_segments;  // tokens of segment 0 in every row
  std::vector<std::int32_t> labels;          // of classes
  std::vector<float> scores;                 // of TaskKind::score and embedding
};

// Fills chance and chance_text of a task: always the most frequent class of the validation set, by
// the first metric of the task.
void set_class_chance(Task& task, const TextExamples& validation);

struct TextSourceOptions {
  std::uint64_t seed = 0;
  bool fixed_length = false;  // all rows as long as the longest that the task allows
};

std::unique_ptr<Source> make_example_source(Task task, TextExamples train, TextExamples validation,
                                            const TextSourceOptions& options);
// The keys `seed` and `fixed_length`.
TextSourceOptions text_source_options(const Settings& data);

}  // namespace lln_torch
