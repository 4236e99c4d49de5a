// One task for each batch that is asked for ahead of time.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/prefetch.h"

namespace lln_torch {

BatchShare rank_share(std::int64_t batch_rows, std::int64_t parts, int rank, int ranks) {
  const std::int64_t first = batch_rows * rank / ranks;
  const std::int64_t end = batch_rows * (rank + 1) / ranks;
  return {.batch_rows = batch_rows, .first = first, .rows = end - first, .parts = parts};
}

std::vector<Batch> batch_parts(const Source& source, std::int64_t step, const BatchShare& share) {
  std::vector<Batch> made;
  for (std::int64_t i = 0; i < share.parts; ++i) {
    const std::int64_t begin = share.rows * i / share.parts;
    const std::int64_t end = share.rows * (i + 1) / share.parts;
    if (begin == end) continue;
    made.push_back(source.train_batch(step, share.batch_rows, share.first + begin, end - begin));
  }
  return made;
}

std::vector<Batch> batch_parts(const Source& source, std::int64_t step, std::int64_t batch_rows,
                               std::int64_t parts) {
  return batch_parts(source, step, rank_share(batch_rows, parts, 0, 1));
}

Prefetch::Prefetch(const Source& source, std::int64_t step, std::int64_t steps,
                   const BatchShare& share, int depth)
    : source_(source), step_(step), steps_(steps), share_(share) {
  for (int i = 0; i < depth; ++i) start();
}

void Prefetch::start() {
  if (step_ >= steps_) return;
  ahead_.push_back(std::async(
      std::launch::async, [this, step = step_++] { return batch_parts(source_, step, share_); }));
}

std::vector<Batch> Prefetch::next() {
  std::vector<Batch> batch = ahead_.front().get();
  ahead_.pop_front();
  start();
  return batch;
}

}  // namespace lln_torch
