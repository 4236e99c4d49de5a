// Tasks whose examples are made, never stored: an example is a function of the seed, the split and
// its index. Splits draw from streams of their own, so that no training example is taken from the
// numbers that made a validation example. What is held out is the same for every seed: results of
// runs that differ in it can be compared.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "lln_torch/config/settings.h"
#include "lln_torch/data/batch.h"
#include "lln_torch/data/random.h"

namespace lln_torch {

enum class Split : std::uint8_t { train, validation, test };

// How many examples there are, and which of them are shown. The keys `seed`, `train_rows`,
// `validation_rows`, `test_rows` and `validation_split` of the table [data].
struct GeneratedSplits {
  std::uint64_t seed = 0;
  std::int64_t train_rows = 0;
  std::int64_t held_out_rows = 0;      // of the split below
  Split held_out = Split::validation;  // or test: which one validation_batch() shows

  static GeneratedSplits from_settings(const Settings& data, std::int64_t train_rows,
                                       std::int64_t validation_rows, std::int64_t test_rows);
};

// The numbers of one example of a task that has a stream of its own.
inline Random example_random(const GeneratedSplits& splits, std::uint64_t task_stream, Split split,
                             std::int64_t index) {
  return {split == Split::train ? splits.seed : 0, task_stream + static_cast<std::uint64_t>(split),
          static_cast<std::uint64_t>(index)};
}

// Puts the examples at these indices into one batch.
using MakeExamples = std::function<Batch(Split, const std::vector<std::int64_t>& indices)>;

std::unique_ptr<Source> make_generated_source(Task task, const GeneratedSplits& splits,
                                              MakeExamples make);

// Rows of different lengths in one block, padded on the right; the mask is left out where nothing
// is padded. As wide as the longest row, rounded up to `unit` so that not every batch is a shape of
// its own, and never wider than `most`; `fixed`: always `most`.
struct PaddedWidth {
  std::int64_t most = 0;
  std::int64_t unit = 1;
  bool fixed = false;
};
TextRows padded_rows(const std::vector<std::vector<std::int32_t>>& rows, const PaddedWidth& width,
                     std::int32_t pad_id);

// The classes of a validation set: its most frequent one, and the shares of all as text.
struct ClassBalance {
  double majority = 0;
  std::string text;  // "class 0 17.2% of 2000 rows (0: 17.2%, 1: ...)"
};
ClassBalance class_balance(const std::vector<std::int32_t>& labels, std::int64_t classes,
                           const std::vector<std::string>& names = {});

}  // namespace lln_torch
