// lln train as one of several processes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>

#include "lln_torch/parallel/ranks.h"

namespace lln::cli {

inline constexpr int kRankLost = 8;  // exit code: another rank is gone, or has ended the job

// Calls `train` with the ranks that the environment tells of, or with null. What it throws is told
// to the other ranks; a lost rank ends the program.
int train_among_ranks(double timeout_seconds, bool json,
                      const std::function<int(lln_torch::Ranks*)>& train);

}  // namespace lln::cli
