// A model with its data, as a config describes them: what training, evaluation and dumps start
// from.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "lln_torch/models/model.h"
#include "lln_torch/train/run_folder.h"
#include "lln_torch/train/train_settings.h"

namespace lln_torch {

// "cpu" or "cuda", of which `index` becomes the current one; throws lln::Error (device) where there
// is no such device.
torch::Device find_device(const std::string& name, int index = 0);

struct RunModel {
  std::string name;       // the key of that name, or the attention and its matching
  std::string attention;  // its name in the zoo
  std::unique_ptr<Source> source;
  TrainSettings settings;
  std::shared_ptr<Model> model;  // on the device
  std::int64_t parameters = 0;
};

// Asks for every key of the config and refuses those that nobody knows. Parameters are drawn from
// the seed of [train]; for a run that begins, and where [train] has the key start_from, those of
// the body are read from there. Of other runs the checkpoint has them.
RunModel make_run_model(const Settings& config, const std::string& data_folder,
                        const torch::Device& device, bool begins);

// The step that `which` means: "best" (the last where nothing was evaluated yet), "last", or a
// number. Throws lln::Error that names the checkpoints there are.
std::int64_t find_checkpoint(const RunFolder& run, const std::string& which);

}  // namespace lln_torch
