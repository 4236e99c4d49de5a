// Checkpoints of a run: one folder for each step, which appears complete or not at all.
//   checkpoints/step-00001200/weights.safetensors    parameters and buffers of the model
//                             optimizer.safetensors  moments of AdamW, random number generators
//                             state.json             where the run is, and checksums of the others
// A folder is written under a name that starts with ".part-", every file synchronised to disk, then
// renamed. Folders of that name are what a killed run left; they are removed when a store is opened
// for writing.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "lln_torch/train/checkpoint_files.h"
#include "lln_torch/train/named_tensors.h"

namespace lln_torch {

// Where a run is, besides its tensors.
struct RunState {
  std::int64_t step = 0;  // updates made; the next batch is the one of this number
  std::uint64_t seed = 0;
  std::optional<double> best;        // value of the first metric of the task
  std::int64_t best_step = -1;       // the step that it was reached at
  std::int64_t stale = 0;            // evaluations since
  std::int64_t evaluated_step = -1;  // the last step that was evaluated
  double loss_sum = 0;               // since the last row of the log
  std::int64_t loss_count = 0;
  double seconds = 0;  // of training, all sittings together
};

struct Checkpoint {
  RunState state;
  NamedTensors weights, optimizer;
};

class CheckpointStore {
 public:
  // Makes the folder where it is missing and removes what a killed run left in it. `files` outlives
  // this object.
  CheckpointStore(std::string folder, CheckpointFiles& files);

  // Throws lln::Error (io) where anything fails: the checkpoints there before are still there then,
  // and what was begun is removed, now or at the next start.
  void save(const Checkpoint& checkpoint);
  // Removes all but the newest `keep` and the one of step `best`.
  void prune(std::int64_t keep, std::int64_t best);
  // Renames those after `step`, which newest_checkpoint() could not read: otherwise they would
  // count as the newest.
  void set_aside_after(std::int64_t step);

 private:
  void put_back_or_remove(const std::string& part);
  void undo(const std::string& part, const std::string& target) noexcept;

  std::string folder_;
  CheckpointFiles& files_;
};

// Steps of the checkpoints in a folder, ascending.
std::vector<std::int64_t> checkpoint_steps(const std::string& folder);
std::string checkpoint_path(const std::string& folder, std::int64_t step);

// Throws lln::Error (io) where a file is missing, is no such file, or has another checksum than
// state.json says.
Checkpoint load_checkpoint(const std::string& path);
// state.json alone.
RunState load_run_state(const std::string& path);

// The newest that can be read; `warn` is told of each that cannot. None where there is none.
std::optional<Checkpoint> newest_checkpoint(const std::string& folder,
                                            const std::function<void(const std::string&)>& warn);

}  // namespace lln_torch
