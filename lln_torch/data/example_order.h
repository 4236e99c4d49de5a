// Which examples the rows of a batch show: every epoch its own order of all examples, found without
// the batches before, so that a run resumes at any step and ranks read their share of a batch.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <vector>

#include "lln/error.h"
#include "lln_torch/data/random.h"

namespace lln_torch {

struct OrderedRow {
  std::int64_t number = 0;   // of the row since training began: what augmentation depends on
  std::int64_t example = 0;  // 0 .. examples - 1
};

class ExampleOrder {
 public:
  ExampleOrder(std::uint64_t seed, std::int64_t examples) : seed_(seed), examples_(examples) {}

  std::int64_t examples() const { return examples_; }
  double steps_per_epoch(std::int64_t batch_rows) const {
    return static_cast<double>(examples_) / static_cast<double>(batch_rows);
  }

  std::vector<OrderedRow> rows(std::int64_t step, std::int64_t batch_rows, std::int64_t first,
                               std::int64_t rows) const {
    if (step < 0 || batch_rows < 1 || first < 0 || rows < 0 || first + rows > batch_rows) {
      throw lln::Error(lln::ErrorCode::invalid_argument,
                       fmt::format("train_batch: rows {} to {} of the {} rows of batch {}", first,
                                   first + rows, batch_rows, step));
    }
    std::vector<OrderedRow> result;
    result.reserve(static_cast<std::size_t>(rows));
    const std::int64_t begin = step * batch_rows + first;
    Permutation order(seed_, static_cast<std::uint64_t>(begin / examples_), examples_);
    for (std::int64_t number = begin; number < begin + rows; ++number) {
      const std::int64_t position = number % examples_;
      if (position == 0) {
        order = Permutation(seed_, static_cast<std::uint64_t>(number / examples_), examples_);
      }
      result.push_back({number, order[position]});
    }
    return result;
  }

 private:
  std::uint64_t seed_;
  std::int64_t examples_;
};

// Rows first to first + rows of a validation set, checked.
inline std::vector<std::int64_t> validation_examples(std::int64_t first, std::int64_t rows,
                                                     std::int64_t examples) {
  if (first < 0 || rows < 0 || first + rows > examples) {
    throw lln::Error(lln::ErrorCode::invalid_argument,
                     fmt::format("validation_batch: rows {} to {} of a validation set of {}", first,
                                 first + rows, examples));
  }
  std::vector<std::int64_t> result;
  result.reserve(static_cast<std::size_t>(rows));
  for (std::int64_t i = first; i < first + rows; ++i) result.push_back(i);
  return result;
}

}  // namespace lln_torch
