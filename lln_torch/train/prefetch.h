// Batches made ahead on threads of their own, while the device computes. A batch depends on its
// step alone, so that order and number of threads change nothing.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <deque>
#include <future>
#include <vector>

#include "lln_torch/data/batch.h"

namespace lln_torch {

// Rows of a batch, in `parts` parts as equal as they can be.
struct BatchShare {
  std::int64_t batch_rows = 0;  // of the whole batch
  std::int64_t first = 0, rows = 0;
  std::int64_t parts = 1;
};

// Of `batch_rows` rows those that rank `rank` of `ranks` computes: as many as others, or one more.
BatchShare rank_share(std::int64_t batch_rows, std::int64_t parts, int rank, int ranks);

// The share of the batch of `step`. Parts without a row are left out.
std::vector<Batch> batch_parts(const Source& source, std::int64_t step, const BatchShare& share);
// All of it.
std::vector<Batch> batch_parts(const Source& source, std::int64_t step, std::int64_t batch_rows,
                               std::int64_t parts);

class Prefetch {
 public:
  // The source outlives this object. Batches from `step` to `steps` - 1, `depth` of them ahead.
  Prefetch(const Source& source, std::int64_t step, std::int64_t steps, const BatchShare& share,
           int depth);
  // The next batch; an exception of the source comes out here.
  std::vector<Batch> next();

 private:
  void start();

  const Source& source_;
  std::int64_t step_, steps_;
  BatchShare share_;
  std::deque<std::future<std::vector<Batch>>> ahead_;  // waited for when destroyed
};

}  // namespace lln_torch
