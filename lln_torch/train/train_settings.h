// The table [train] of a config: how a model is trained, whatever it is.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "lln_torch/config/settings.h"
#include "lln_torch/data/batch.h"
#include "lln_torch/train/optimizer.h"
#include "lln_torch/train/schedule.h"
#include "lln_torch/train/train_step.h"

namespace lln_torch {

struct TrainSettings {
  std::uint64_t seed = 0;
  std::int64_t batch = 32;      // rows of a step
  std::int64_t accumulate = 1;  // parts that a batch is computed in
  Schedule schedule;            // with the number of steps
  OptimizerOptions optimizer;
  StepOptions step;
  std::int64_t log_every = 10;
  std::int64_t evaluate_every = 0;    // 0: at the end alone
  std::int64_t evaluate_rows = 0;     // of the validation; 0: all
  std::int64_t evaluate_batch = 0;    // rows at once
  std::int64_t patience = 0;          // evaluations without a better one until it ends; 0: never
  std::int64_t checkpoint_every = 0;  // 0: at the end, and where an evaluation was the best
  std::int64_t keep = 2;              // newest checkpoints that stay, besides the best
  std::int64_t instruments_every = 0;
  std::int64_t instruments_rows = 1;      // of the fixed batch
  std::int64_t instruments_tokens = 512;  // of a row, at most
};

// Asks for every key of the table [train]; docs/training.md lists them. The source says how many
// steps an epoch has.
TrainSettings read_train_settings(const Settings& train, const Source& source);

}  // namespace lln_torch
