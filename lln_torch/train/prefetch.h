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

// The batch of `step` in `parts` equal parts.
std::vector<Batch> batch_parts(const Source& source, std::int64_t step, std::int64_t rows,
                               std::int64_t parts);

class Prefetch {
 public:
  // The source outlives this object. Batches from `step` to `steps` - 1, `depth` of them ahead.
  Prefetch(const Source& source, std::int64_t step, std::int64_t steps, std::int64_t rows,
           std::int64_t parts, int depth);
  // The next batch; an exception of the source comes out here.
  std::vector<Batch> next();

 private:
  void start();

  const Source& source_;
  std::int64_t step_, steps_, rows_, parts_;
  std::deque<std::future<std::vector<Batch>>> ahead_;  // waited for when destroyed
};

}  // namespace lln_torch
