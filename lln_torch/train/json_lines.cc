// Logs as lines of JSON.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/json_lines.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <nlohmann/json.hpp>
#include <span>

#include "io/output_file.h"
#include "lln/error.h"

namespace lln_torch {
namespace {

[[noreturn]] void fail_log(const std::string& path, const char* what) {
  throw lln::Error(lln::ErrorCode::io, fmt::format("{}: {}: {}", path, what, std::strerror(errno)));
}

}  // namespace

JsonLines::JsonLines(const std::string& path) : path_(path) {
  file_ = ::open(path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (file_ < 0) fail_log(path, "cannot be opened");
}

JsonLines::~JsonLines() { ::close(file_); }

void JsonLines::append(const nlohmann::ordered_json& row) {
  const std::string line =
      row.dump(-1, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
  std::size_t done = 0;
  while (done < line.size()) {
    const ssize_t put = ::write(file_, line.data() + done, line.size() - done);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail_log(path_, "cannot be written");
    done += static_cast<std::size_t>(put);
  }
}

void JsonLines::sync() {
  if (::fsync(file_) != 0) fail_log(path_, "cannot be synchronised to disk");
}

std::vector<nlohmann::ordered_json> read_json_lines(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) fail_log(path, "cannot be read");
  const std::string text{std::istreambuf_iterator<char>(file), {}};
  std::vector<nlohmann::ordered_json> rows;
  std::size_t begin = 0;
  for (int line = 1;; ++line) {
    const std::size_t end = text.find('\n', begin);
    if (end == std::string::npos) return rows;
    auto row = nlohmann::ordered_json::parse(text.begin() + static_cast<std::ptrdiff_t>(begin),
                                             text.begin() + static_cast<std::ptrdiff_t>(end),
                                             nullptr, false);
    if (!row.is_object() || !row.contains("step") || !row["step"].is_number_integer()) {
      throw lln::Error(
          lln::ErrorCode::io,
          fmt::format("{}:{}: expected a JSON object with an integer 'step', found {}", path, line,
                      text.substr(begin, std::min<std::size_t>(end - begin, 60))));
    }
    rows.push_back(std::move(row));
    begin = end + 1;
  }
}

void cut_back(const std::string& path, std::int64_t step) {
  if (!std::filesystem::exists(path)) return;
  std::string kept;
  for (const nlohmann::ordered_json& row : read_json_lines(path)) {
    if (row["step"].get<std::int64_t>() <= step) kept += row.dump() + "\n";
  }
  const std::function<bool()> never;
  lln::io::OutputFile file(path, never);
  file.write(std::as_bytes(std::span(kept)));
  file.rename_to_target();
}

}  // namespace lln_torch
