// One task for each batch that is asked for ahead of time.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/prefetch.h"

namespace lln_torch {

std::vector<Batch> batch_parts(const Source& source, std::int64_t step, std::int64_t rows,
                               std::int64_t parts) {
  std::vector<Batch> made;
  const std::int64_t each = rows / parts;
  for (std::int64_t i = 0; i < parts; ++i) {
    made.push_back(source.train_batch(step, rows, i * each, each));
  }
  return made;
}

Prefetch::Prefetch(const Source& source, std::int64_t step, std::int64_t steps, std::int64_t rows,
                   std::int64_t parts, int depth)
    : source_(source), step_(step), steps_(steps), rows_(rows), parts_(parts) {
  for (int i = 0; i < depth; ++i) start();
}

void Prefetch::start() {
  if (step_ >= steps_) return;
  ahead_.push_back(std::async(std::launch::async, [this, step = step_++] {
    return batch_parts(source_, step, rows_, parts_);
  }));
}

std::vector<Batch> Prefetch::next() {
  std::vector<Batch> batch = ahead_.front().get();
  ahead_.pop_front();
  start();
  return batch;
}

}  // namespace lln_torch
