// The folder of a run.
//   config.toml        as it was given
//   config.json        with all defaults; a run has begun when it is there
//   run.json           what is known of the run besides: data folder, threads, task, parameters
//   metrics.jsonl      training and evaluation against the step
//   instruments.jsonl  temperature, entropy, gap, alpha and beta against the step
//   checkpoints/       see checkpoint.h
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json_fwd.hpp>
#include <string>

namespace lln_torch {

class RunFolder {
 public:
  explicit RunFolder(std::string path);

  const std::string& path() const { return path_; }
  std::string config_toml() const { return path_ + "/config.toml"; }
  std::string config_json() const { return path_ + "/config.json"; }
  std::string run_json() const { return path_ + "/run.json"; }
  std::string metrics() const { return path_ + "/metrics.jsonl"; }
  std::string instruments() const { return path_ + "/instruments.jsonl"; }
  std::string checkpoints() const { return path_ + "/checkpoints"; }

  bool begun() const;  // config.json is there
  bool empty() const;  // or not there at all

  // Makes the folder and those above it.
  void make() const;
  // Writes the three files, config.json last.
  void write_config(const std::string& toml, const nlohmann::ordered_json& resolved,
                    const nlohmann::ordered_json& run) const;
  nlohmann::ordered_json read_config() const;
  nlohmann::ordered_json read_run() const;

 private:
  std::string path_;
};

// While it lives no other process trains in the folder; throws lln::Error where one does.
class RunLock {
 public:
  explicit RunLock(const RunFolder& run);
  ~RunLock();
  RunLock(const RunLock&) = delete;
  RunLock& operator=(const RunLock&) = delete;

 private:
  int file_ = -1;
};

}  // namespace lln_torch
