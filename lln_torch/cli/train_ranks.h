// lln train as one of several processes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <mutex>
#include <string>

#include "lln_torch/parallel/ranks.h"

namespace lln::cli {

inline constexpr int kRankLost = 8;  // exit code: another rank is gone, or has ended the job

// What a message about a lost rank adds where there is a checkpoint to go on from, as far as this
// process can see. Threads may use it at once.
class ResumeHint {
 public:
  void set_checkpoints(const std::string& folder);  // when the training begins
  std::string text() const;

 private:
  mutable std::mutex mutex_;
  std::string folder_;
};

// Calls `train` with the ranks that the environment tells of, or with null. What it throws is told
// to the other ranks; a lost rank ends the program.
int train_among_ranks(double timeout_seconds, bool json,
                      const std::function<int(lln_torch::Ranks*, ResumeHint&)>& train);

}  // namespace lln::cli
