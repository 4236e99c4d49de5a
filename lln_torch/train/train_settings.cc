// Keys of the table [train], their ranges and what they may not be together.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/train_settings.h"

#include <algorithm>
#include <cmath>

namespace lln_torch {
namespace {

constexpr std::int64_t kManySteps = 1'000'000'000;
constexpr std::int64_t kManyRows = 1'000'000;

Schedule read_schedule(const Settings& train, const Source& source, std::int64_t batch) {
  Schedule schedule;
  if (train.has("epochs")) {
    if (train.has("steps")) train.refuse("epochs", "either steps or epochs, not both");
    const double epochs = train.number("epochs", 1, 1e-6, 1e6);
    const double steps = std::ceil(epochs * source.steps_per_epoch(batch));
    if (!(steps >= 1 && steps <= static_cast<double>(kManySteps))) {
      train.refuse("epochs", "a number of epochs with 1 to 1000000000 steps");
    }
    schedule.steps = static_cast<std::int64_t>(steps);
  } else {
    schedule.steps = train.integer("steps", 1000, 1, kManySteps);
  }
  schedule.shape = train.choice("schedule", "linear", schedule_shapes());
  schedule.peak = train.number("learning_rate", 1e-3, 0, 10);
  schedule.warmup = train.integer("warmup", 0, 0, kManySteps);
  if (schedule.warmup > schedule.steps) {
    train.refuse("warmup",
                 "at most as many steps as the run has, " + std::to_string(schedule.steps));
  }
  schedule.final_share = train.number("final_share", 0, 0, 1);
  return schedule;
}

}  // namespace

TrainSettings read_train_settings(const Settings& train, const Source& source) {
  TrainSettings read;
  read.seed = static_cast<std::uint64_t>(train.integer("seed", 0, 0, INT64_MAX));
  read.batch = train.integer("batch", 32, 1, kManyRows);
  read.accumulate = train.integer("accumulate", 1, 1, kManyRows);
  if (read.batch % read.accumulate != 0) {
    train.refuse("accumulate", "a divisor of batch, " + std::to_string(read.batch));
  }
  read.schedule = read_schedule(train, source, read.batch);
  const bool sgd = train.choice("optimizer", "adamw", {"adamw", "sgd"}) == "sgd";
  read.optimizer.kind = sgd ? OptimizerKind::sgd : OptimizerKind::adamw;
  read.optimizer.beta1 = train.number("beta1", 0.9, 0, 0.9999999);
  read.optimizer.beta2 = train.number("beta2", 0.999, 0, 0.9999999);
  read.optimizer.epsilon = train.number("epsilon", 1e-8, 0, 1);
  read.optimizer.weight_decay = train.number("weight_decay", sgd ? 0 : 0.01, 0, 10);
  read.optimizer.decay_all = train.choice("decay", "matrices", {"matrices", "all"}) == "all";
  read.step.clip = train.number("clip", 1, 0, 1e6);
  read.step.bf16 = train.choice("precision", "f32", {"f32", "bf16"}) == "bf16";
  read.step.cuda_graph = train.flag("cuda_graph", false);
  read.step.side_work = train.flag("side_work", false);
  read.log_every = train.integer("log_every", 10, 1, kManySteps);
  read.evaluate_every = train.integer("evaluate_every", 0, 0, kManySteps);
  read.evaluate_rows = train.integer("evaluate_rows", 0, 0, kManySteps);
  read.evaluate_batch = train.integer(
      "evaluate_batch", std::max<std::int64_t>(1, read.batch / read.accumulate), 1, kManyRows);
  read.patience = train.integer("patience", 0, 0, kManySteps);
  if (read.patience > 0 && read.evaluate_every == 0) {
    train.refuse("patience", "evaluate_every above 0 beside it");
  }
  read.checkpoint_every = train.integer("checkpoint_every", 0, 0, kManySteps);
  read.keep = train.integer("keep", 2, 1, kManySteps);
  read.instruments_every = train.integer("instruments_every", 0, 0, kManySteps);
  read.instruments_rows = train.integer("instruments_rows", 1, 1, 1024);
  read.instruments_tokens = train.integer("instruments_tokens", 512, 2, 65536);
  return read;
}

}  // namespace lln_torch
