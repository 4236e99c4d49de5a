// What lln eval and lln dump share: a run and one of its checkpoints, loaded.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "lln_torch/cli/verbs.h"
#include "lln_torch/train/run_model.h"

namespace lln::cli {

struct RunArguments {
  std::string run, data, device = "cpu", checkpoint = "best";
  int threads = 0;
  bool json = false;
};

void add_run_arguments(CLI::App& command, RunArguments& arguments);

struct LoadedRun {
  lln_torch::RunModel made;
  torch::Device device = torch::kCPU;
  std::int64_t step = 0;  // of the checkpoint
};

LoadedRun load_run(const RunArguments& arguments);

}  // namespace lln::cli
