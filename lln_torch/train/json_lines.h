// A log of one JSON object a line, each with its step: what a run writes of its metrics. A run that
// resumes cuts it back to the step of its checkpoint, so that no step is told twice.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace lln_torch {

class JsonLines {
 public:
  // Appends to `path`, which need not exist. Throws lln::Error (io) where it cannot be written.
  explicit JsonLines(const std::string& path);
  ~JsonLines();
  JsonLines(const JsonLines&) = delete;
  JsonLines& operator=(const JsonLines&) = delete;

  // Numbers that are not finite are written as null, as JSON has none.
  void append(const nlohmann::ordered_json& row);
  // What was appended is on the disk afterwards.
  void sync();

 private:
  std::string path_;
  int file_ = -1;
};

// Leaves the rows whose "step" is at most `step`, and drops a last line that was cut off. The file
// is replaced as a whole or left as it was.
void cut_back(const std::string& path, std::int64_t step);

// All rows. A last line without its end, which a killed run leaves, is left out; any other line
// that is no JSON object is an lln::Error (io) with its number.
std::vector<nlohmann::ordered_json> read_json_lines(const std::string& path);

}  // namespace lln_torch
