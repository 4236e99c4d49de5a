// The one loop that trains every model on every task. It writes logs and checkpoints into the
// folder of the run and says nothing itself: who watches gets events.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <nlohmann/json_fwd.hpp>
#include <string>

#include "lln_torch/models/model.h"
#include "lln_torch/parallel/rank_group.h"
#include "lln_torch/train/checkpoint.h"
#include "lln_torch/train/run_folder.h"
#include "lln_torch/train/stop_signal.h"
#include "lln_torch/train/train_settings.h"

namespace lln_torch {

// All references outlive the call.
struct TrainJob {
  Model& model;  // on the device
  const Source& source;
  const TrainSettings& settings;
  const RunFolder& run;
  torch::Device device = torch::kCPU;
  CheckpointFiles& files;
  const StopSignals* signals = nullptr;
  // Each rank trains on its rows of every batch. Rank 0 alone logs, saves and has events, and it
  // evaluates, with those that have the same rows; a signal to one rank ends all at the same step.
  const RankGroup* group = nullptr;
  // Of these, the ranks that have the same rows, each some of their tokens: as many in every such
  // group, one after the other. Null: each rank has whole rows.
  const RankGroup* sequence = nullptr;
};

struct TrainProgress {
  std::int64_t step = 0, steps = 0;
  double loss = 0, learning_rate = 0, gradient_norm = 0;
  double rows_per_second = 0;
  double tokens_per_second = 0;  // 0 where rows are images
  double seconds_left = 0;
  std::int64_t memory_bytes = 0;  // the most so far, of the process or of the device
};

struct TrainEvents {
  std::function<void(const TrainProgress&)> progress = [](const TrainProgress&) {};
  std::function<void(const nlohmann::ordered_json& row)> evaluated =
      [](const nlohmann::ordered_json&) {};
  std::function<void(const std::string&)> warn = [](const std::string&) {};
};

enum class TrainEnd {
  finished,  // all steps were made
  early,     // evaluations stopped to improve
  signal,    // a signal came; the state is saved
};

// Starts, or goes on from the newest checkpoint of the run that can be read: then everything is, on
// a CPU with as many threads, as if it had never stopped, bit for bit. Throws NotFinite where a
// loss or a gradient is not finite, RankLost where another rank is lost, lln::Error where a file
// cannot be written.
TrainEnd train(const TrainJob& job, const TrainEvents& events);

// Threads of torch, its deterministic algorithms where the device is a CPU, and on a GPU the linear
// algebra that runs in its stream.
void prepare_torch(int threads, const torch::Device& device);

}  // namespace lln_torch
