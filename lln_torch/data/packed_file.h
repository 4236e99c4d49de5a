// Files as they are kept on disk: one that may be compressed (.xz, .gz, .bz2, .zst), read as a
// whole; and the members of a tar, found in one walk and then read one by one, without unpacking.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "io/input_file.h"

namespace lln_torch {

// `name` in `folder`, or the same with the ending of a compression; empty where there is none.
std::string find_packed_file(const std::string& folder, const std::string& name);

// All bytes, decompressed. An Error (io) where there are more than `most`.
std::vector<std::uint8_t> read_packed_file(const std::string& path, std::uint64_t most);

constexpr std::uint64_t kMostTarInMemory = std::uint64_t{1} << 34;

// The regular files of a tar. Members of a plain tar stay on disk; those of a compressed one cannot
// be found again without reading everything before them, so they are kept in memory.
class TarFile {
 public:
  // Keeps the members whose name `wanted` accepts. An Error (io) where those of a compressed tar
  // have more than `most_in_memory` bytes in all.
  TarFile(const std::string& path, const std::function<bool(const std::string& name)>& wanted,
          std::uint64_t most_in_memory = kMostTarInMemory);

  const std::string& path() const { return file_.path(); }
  std::size_t size() const { return members_.size(); }
  const std::string& name(std::size_t i) const { return members_[i].name; }
  std::vector<std::uint8_t> read(std::size_t i) const;

 private:
  struct Member {
    std::string name;
    std::uint64_t offset = 0;
    std::uint64_t bytes = 0;
    std::vector<std::uint8_t> content;  // of a compressed tar
  };
  lln::io::InputFile file_;
  std::vector<Member> members_;
  bool plain_ = true;
};

}  // namespace lln_torch
