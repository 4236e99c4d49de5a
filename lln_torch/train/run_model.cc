// From a config to data and model.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/run_model.h"

#include <ATen/ATen.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <filesystem>

#include "lln/error.h"
#include "lln_torch/train/checkpoint.h"

namespace lln_torch {
namespace {

// A file of weights, or the run whose best they are.
std::string weights_file(const std::string& path) {
  if (!std::filesystem::is_directory(path)) return path;
  const RunFolder run(path);
  return checkpoint_path(run.checkpoints(), find_checkpoint(run, "best")) + "/weights.safetensors";
}

// The newest that can be read.
RunState newest_run_state(const RunFolder& run) {
  const std::vector<std::int64_t> steps = checkpoint_steps(run.checkpoints());
  for (auto step = steps.rbegin(); step + 1 != steps.rend(); ++step) {
    try {
      return load_run_state(checkpoint_path(run.checkpoints(), *step));
    } catch (const lln::Error&) {  // the training would pass over it, too
    }
  }
  return load_run_state(checkpoint_path(run.checkpoints(), steps.front()));
}

}  // namespace

torch::Device find_device(const std::string& name, int index) {
  if (name == "cuda" && !at::hasCUDA()) {
    throw lln::Error(lln::ErrorCode::device, "--device cuda: torch sees no CUDA device here");
  }
  if (name != "cuda") return torch::kCPU;
  const torch::Device device(torch::kCUDA, static_cast<c10::DeviceIndex>(index));
  const auto* const driver = c10::impl::getDeviceGuardImpl(torch::kCUDA);
  if (index >= driver->deviceCount()) {
    throw lln::Error(lln::ErrorCode::device,
                     fmt::format("--device cuda: local rank {} has no device, torch sees {} here",
                                 index, driver->deviceCount()));
  }
  driver->setDevice(device);
  return device;
}

RunModel make_run_model(const Settings& config, const std::string& data_folder,
                        const torch::Device& device, bool begins) {
  RunModel made;
  const Settings attention = config.table("attention"), train = config.table("train");
  made.source = make_source(config.table("data"), data_folder);
  made.settings = read_train_settings(train, *made.source);
  at::manual_seed(made.settings.seed);
  made.model = make_model(config.table("model"), attention, made.source->task());
  made.attention = attention.text("name", "lln+diag");
  std::string name = made.attention;
  if (attention.has("matching")) name += ", " + attention.text("matching", "");
  made.name = config.text("name", name);
  const std::string start_from = train.text("start_from", "");
  config.finish();
  if (begins && !start_from.empty()) load_body(*made.model, weights_file(start_from));
  made.model->to(device);
  for (const Tensor& parameter : made.model->parameters()) made.parameters += parameter.numel();
  return made;
}

std::int64_t find_checkpoint(const RunFolder& run, const std::string& which) {
  const std::vector<std::int64_t> steps = checkpoint_steps(run.checkpoints());
  if (steps.empty()) {
    throw lln::Error(lln::ErrorCode::io, run.path() + ": the run has no checkpoint yet");
  }
  std::int64_t step = steps.back();
  if (which == "best") {
    const std::int64_t best = newest_run_state(run).best_step;
    if (best >= 0) step = best;
  } else if (which != "last") {
    const char* const end = which.data() + which.size();
    const auto [stop, fault] = std::from_chars(which.data(), end, step);
    if (fault != std::errc() || stop != end) step = -1;
  }
  for (const std::int64_t known : steps) {
    if (known == step) return step;
  }
  throw lln::Error(lln::ErrorCode::invalid_argument,
                   fmt::format("{}: no checkpoint '{}': there are those of steps {}", run.path(),
                               which, fmt::join(steps, ", ")));
}

}  // namespace lln_torch
