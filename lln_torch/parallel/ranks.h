// The processes of one job: where each is, how they meet, and the groups among them that exchange
// tensors. Nothing here reads the environment: who starts the process says its place.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "lln_torch/parallel/rank_group.h"
#include "lln_torch/parallel/rank_watch.h"

namespace lln_torch {

struct RankPlace {
  int rank = 0, size = 1;
  int local_rank = 0;  // among those of this machine: which of its devices is meant
  std::string host;    // of the store
  int port = 0;
  // The store is there already and outlives the job (torchrun's); otherwise rank 0 makes it.
  bool store_is_there = false;
  std::string store_prefix = "lln";  // keys of this attempt of the job
};

void end_process(const std::string& lost);

struct RanksOptions {
  // Ranks that are not there, that are silent, or that others wait for: for how long.
  std::chrono::milliseconds timeout{600'000};
  // See RankWatchOptions.
  // By default prints the text and ends the process with code 1.
  std::function<void(const std::string&)> lost = end_process;
};

class Ranks {
 public:
  // Waits for all. Throws lln::Error that names those that did not come.
  Ranks(const RankPlace& place, const RanksOptions& options);
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  int rank() const { return place_.rank; }
  int size() const { return place_.size; }
  bool first() const { return place_.rank == 0; }
  const RankPlace& place() const { return place_; }
  RankWatch& watch() { return *watch_; }

  // Groups of `size` ranks, one after the other, and of them the one that this rank is in; over
  // NCCL where the device is a CUDA device. Every rank calls it. `name` is one that no other groups
  // have.
  RankGroup group(const std::string& name, const c10::Device& device, int size);
  // All ranks.
  RankGroup group(const std::string& name, const c10::Device& device) {
    return group(name, device, place_.size);
  }

  // The texts of all ranks, in their order; every rank calls it, with a name not used before.
  std::vector<std::string> gather(const std::string& name, const std::string& text);
  // The text of rank 0, for all; what the others pass is not looked at.
  std::string from_first(const std::string& name, const std::string& text);

  // After all that groups do: see RankWatch::leave().
  std::optional<std::string> leave();

 private:
  void wait_for(const std::string& key);

  RankPlace place_;
  RanksOptions options_;
  Store store_;
  std::unique_ptr<RankWatch> watch_;
  std::vector<Backend> backends_;  // may wait for others when they end, so the watch ends later
};

}  // namespace lln_torch
