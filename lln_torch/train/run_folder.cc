// Files of a run that are written once, and its lock.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/run_folder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/file.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <utility>

#include "lln/error.h"
#include "lln_torch/train/checkpoint_files.h"

namespace lln_torch {
namespace {

nlohmann::ordered_json read_json_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    throw lln::Error(lln::ErrorCode::io,
                     fmt::format("{}: cannot be read: {}", path, std::strerror(errno)));
  }
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  auto json = nlohmann::ordered_json::parse(text, nullptr, false);
  if (!json.is_object()) {
    throw lln::Error(lln::ErrorCode::io, path + ": expected a JSON object");
  }
  return json;
}

}  // namespace

RunFolder::RunFolder(std::string path) : path_(std::move(path)) {
  while (path_.size() > 1 && path_.ends_with('/')) path_.pop_back();
}

bool RunFolder::begun() const { return std::filesystem::exists(config_json()); }

bool RunFolder::empty() const {
  std::error_code missing;
  const std::filesystem::directory_iterator first(path_, missing);
  return missing ? !std::filesystem::exists(path_) : first == std::filesystem::directory_iterator();
}

void RunFolder::make() const {
  std::error_code error;
  std::filesystem::create_directories(path_, error);
  if (error) {
    throw lln::Error(lln::ErrorCode::io,
                     fmt::format("{}: cannot be made: {}", path_, error.message()));
  }
}

void RunFolder::write_config(const std::string& toml, const nlohmann::ordered_json& resolved,
                             const nlohmann::ordered_json& run) const {
  CheckpointFiles files;
  files.write_text(config_toml(), toml);
  files.write_text(run_json(), run.dump(2) + "\n");
  files.write_text(config_json(), resolved.dump(2) + "\n");
}

nlohmann::ordered_json RunFolder::read_config() const { return read_json_file(config_json()); }

nlohmann::ordered_json RunFolder::read_run() const { return read_json_file(run_json()); }

RunLock::RunLock(const RunFolder& run) {
  file_ = ::open(run.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (file_ < 0) {
    throw lln::Error(lln::ErrorCode::io,
                     fmt::format("{}: cannot be opened: {}", run.path(), std::strerror(errno)));
  }
  if (::flock(file_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    ::close(file_);
    throw lln::Error(lln::ErrorCode::io,
                     fmt::format("{}: another process is training in it", run.path()));
  }
}

RunLock::~RunLock() { ::close(file_); }

}  // namespace lln_torch
