// Checkpoints: the order of writes is what makes them atomic, the checksums what makes a damaged
// one visible.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/checkpoint.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "lln/error.h"

namespace lln_torch {
namespace {

namespace fs = std::filesystem;
using StateJson = nlohmann::ordered_json;

constexpr const char* kStepPrefix = "step-";
constexpr const char* kPartPrefix = ".part-";
constexpr const char* kOldSuffix = "-old";
constexpr int kStateVersion = 1;

std::string hex_of(std::uint64_t value) { return fmt::format("{:016x}", value); }

StateJson state_to_json(const RunState& state) {
  return {{"version", kStateVersion},
          {"step", state.step},
          {"seed", state.seed},
          {"best", state.best ? StateJson(*state.best) : StateJson(nullptr)},
          {"best_step", state.best_step},
          {"evaluations_since_best", state.stale},
          {"evaluated_step", state.evaluated_step},
          {"loss_sum", state.loss_sum},
          {"loss_count", state.loss_count},
          {"seconds", state.seconds}};
}

RunState state_from_json(const StateJson& json) {
  if (json.at("version") != kStateVersion) {
    throw lln::Error(lln::ErrorCode::io, fmt::format("version is {}: expected {}",
                                                     json.at("version").dump(), kStateVersion));
  }
  RunState state;
  state.step = json.at("step");
  state.seed = json.at("seed");
  if (!json.at("best").is_null()) state.best = json.at("best").get<double>();
  state.best_step = json.at("best_step");
  state.stale = json.at("evaluations_since_best");
  state.evaluated_step = json.at("evaluated_step");
  state.loss_sum = json.at("loss_sum");
  state.loss_count = json.at("loss_count");
  state.seconds = json.at("seconds");
  return state;
}

// The object of state.json, its own checksum checked.
StateJson read_state(const std::string& path) {
  const std::string name = path + "/state.json";
  std::ifstream file(name, std::ios::binary);
  if (!file) throw lln::Error(lln::ErrorCode::io, name + ": cannot be read");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  StateJson json = StateJson::parse(text, nullptr, false);
  if (!json.is_object() || !json.contains("checksum")) {
    throw lln::Error(lln::ErrorCode::io, name + ": expected a JSON object with a checksum");
  }
  const std::string claimed = json["checksum"].dump();
  json.erase("checksum");
  const std::string found = StateJson(hex_of(checksum_of_text(json.dump()))).dump();
  if (claimed != found) {
    throw lln::Error(lln::ErrorCode::io,
                     fmt::format("{}: its checksum is {}, but it says {}", name, found, claimed));
  }
  return json;
}

RunState run_state_of(const StateJson& json, const std::string& path) {
  try {
    return state_from_json(json);
  } catch (const std::exception& e) {
    throw lln::Error(lln::ErrorCode::io, fmt::format("{}/state.json: {}", path, e.what()));
  }
}

NamedTensors read_checked(const std::string& path, const std::string& claimed) {
  NamedTensors tensors = read_tensors(path);
  const std::string found = hex_of(checksum(tensors));
  if (found != claimed) {
    throw lln::Error(lln::ErrorCode::io, fmt::format("{}: its checksum is {}, state.json says {}",
                                                     path, found, claimed));
  }
  return tensors;
}

}  // namespace

CheckpointStore::CheckpointStore(std::string folder, CheckpointFiles& files)
    : folder_(std::move(folder)), files_(files) {
  if (!fs::exists(folder_)) files_.make_folder(folder_);
  std::vector<std::string> left;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder_, error)) {
    if (entry.path().filename().string().starts_with(kPartPrefix)) {
      left.push_back(entry.path().string());
    }
  }
  if (error) {
    throw lln::Error(lln::ErrorCode::io,
                     fmt::format("{}: cannot be read: {}", folder_, error.message()));
  }
  for (const std::string& path : left) put_back_or_remove(path);
}

// A step that is saved a second time is set aside until its new form has its name. Where the
// program ended between the two, the old one is the checkpoint.
void CheckpointStore::put_back_or_remove(const std::string& part) {
  const std::string name = fs::path(part).filename().string();
  if (name.ends_with(kOldSuffix)) {
    const std::size_t start = std::char_traits<char>::length(kPartPrefix);
    const std::size_t end = name.size() - std::char_traits<char>::length(kOldSuffix);
    const std::string target = folder_ + "/" + kStepPrefix + name.substr(start, end - start);
    std::error_code ignored;
    if (!fs::exists(target, ignored)) {
      files_.rename(part, target);
      return;
    }
  }
  files_.remove(part);
}

void CheckpointStore::save(const Checkpoint& checkpoint) {
  const NamedTensors weights = to_host(checkpoint.weights);
  const NamedTensors optimizer = to_host(checkpoint.optimizer);
  StateJson state = state_to_json(checkpoint.state);
  state["weights"] = hex_of(checksum(weights));
  state["optimizer"] = hex_of(checksum(optimizer));
  state["checksum"] = hex_of(checksum_of_text(state.dump()));

  const std::string target = checkpoint_path(folder_, checkpoint.state.step);
  const std::string part = fmt::format("{}/{}{:08}", folder_, kPartPrefix, checkpoint.state.step);
  const std::string old = part + kOldSuffix;
  std::error_code ignored;
  try {
    if (fs::exists(part, ignored)) files_.remove(part);
    files_.make_folder(part);
    files_.write_tensors(part + "/weights.safetensors", to_write(weights));
    files_.write_tensors(part + "/optimizer.safetensors", to_write(optimizer));
    files_.write_text(part + "/state.json", state.dump(2) + "\n");
    files_.sync_folder(part);
    if (fs::exists(target, ignored)) files_.rename(target, old);
    files_.rename(part, target);
    files_.sync_folder(folder_);
    if (fs::exists(old, ignored)) files_.remove(old);
  } catch (const lln::Error& e) {
    undo(part, target);
    throw lln::Error(e.code(), fmt::format("the checkpoint of step {} could not be saved; earlier "
                                           "ones are untouched: {}",
                                           checkpoint.state.step, e.what()));
  }
}

void CheckpointStore::undo(const std::string& part, const std::string& target) noexcept {
  try {
    const std::string old = part + kOldSuffix;
    if (!fs::exists(target) && fs::exists(old)) files_.rename(old, target);
    if (fs::exists(part)) files_.remove(part);
  } catch (const std::exception&) {
    // Left for the next start; what matters is the first failure.
  }
}

void CheckpointStore::set_aside_after(std::int64_t step) {
  for (const std::int64_t later : checkpoint_steps(folder_)) {
    if (later <= step) continue;
    const std::string aside = fmt::format("{}/damaged-{:08}", folder_, later);
    if (fs::exists(aside)) files_.remove(aside);
    files_.rename(checkpoint_path(folder_, later), aside);
  }
}

void CheckpointStore::prune(std::int64_t keep, std::int64_t best) {
  std::vector<std::int64_t> steps = checkpoint_steps(folder_);
  if (std::ssize(steps) <= keep) return;
  steps.resize(steps.size() - static_cast<std::size_t>(keep));
  for (const std::int64_t step : steps) {
    if (step == best) continue;
    // Renamed first: a folder that is half removed must not look like a checkpoint.
    const std::string part = fmt::format("{}/{}{:08}-removed", folder_, kPartPrefix, step);
    files_.rename(checkpoint_path(folder_, step), part);
    files_.remove(part);
  }
}

std::vector<std::int64_t> checkpoint_steps(const std::string& folder) {
  std::vector<std::int64_t> steps;
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (!name.starts_with(kStepPrefix)) continue;
    const char* const first = name.data() + std::char_traits<char>::length(kStepPrefix);
    const char* const last = name.data() + name.size();
    std::int64_t step = 0;
    const auto [end, fault] = std::from_chars(first, last, step);
    if (fault == std::errc() && end == last) steps.push_back(step);
  }
  std::sort(steps.begin(), steps.end());
  return steps;
}

std::string checkpoint_path(const std::string& folder, std::int64_t step) {
  return fmt::format("{}/{}{:08}", folder, kStepPrefix, step);
}

RunState load_run_state(const std::string& path) { return run_state_of(read_state(path), path); }

Checkpoint load_checkpoint(const std::string& path) {
  const StateJson json = read_state(path);
  Checkpoint found;
  found.state = run_state_of(json, path);
  found.weights = read_checked(path + "/weights.safetensors", json.value("weights", ""));
  found.optimizer = read_checked(path + "/optimizer.safetensors", json.value("optimizer", ""));
  return found;
}

std::optional<Checkpoint> newest_checkpoint(const std::string& folder,
                                            const std::function<void(const std::string&)>& warn) {
  std::vector<std::int64_t> steps = checkpoint_steps(folder);
  for (auto step = steps.rbegin(); step != steps.rend(); ++step) {
    try {
      return load_checkpoint(checkpoint_path(folder, *step));
    } catch (const lln::Error& e) {
      warn(fmt::format("{}; the checkpoint before it is used", e.what()));
    }
  }
  return std::nullopt;
}

}  // namespace lln_torch
