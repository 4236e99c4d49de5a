// A regular file that is read by position: opened safely, its size known, every short read an
// error. What both readers of tensor files stand on.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "io/bytes.h"

namespace lln::io {

class InputFile {
 public:
  explicit InputFile(const std::string& path);
  ~InputFile();
  InputFile(const InputFile&) = delete;
  InputFile& operator=(const InputFile&) = delete;

  const std::string& path() const noexcept { return path_; }
  std::uint64_t bytes() const noexcept { return bytes_; }  // when it was opened
  void read_at(std::uint64_t offset, std::span<std::byte> into, const std::string& what) const;
  // New memory of this size. The caller has compared it with bytes().
  Bytes read_at(std::uint64_t offset, std::uint64_t size, const std::string& what) const;

 private:
  std::string path_;
  int file_ = -1;
  std::uint64_t bytes_ = 0;
};

}  // namespace lln::io
