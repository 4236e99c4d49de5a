// A file that appears complete or not at all: the work is in a temporary file beside it, which is
// synchronised to disk and renamed at the end, and removed when anything fails.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <span>
#include <string>

namespace lln::io {

// Why `path` cannot be written, found out before the work that ends there; empty when it can.
std::string write_obstacle(const std::string& path);

class OutputFile {
 public:
  // `interrupted` outlives this object; it is asked every few MiB, and once it says true the
  // temporary file is removed and an Error thrown.
  OutputFile(const std::string& target, const std::function<bool()>& interrupted);
  ~OutputFile();
  OutputFile(const OutputFile&) = delete;
  OutputFile& operator=(const OutputFile&) = delete;

  void write(std::span<const std::byte> bytes);
  void rename_to_target();

 private:
  void check_interrupted() const;
  [[noreturn]] void fail(const std::string& what) const;

  std::string target_;
  const std::function<bool()>& interrupted_;
  std::string name_;
  int file_ = -1;
  bool renamed_ = false;
};

}  // namespace lln::io
