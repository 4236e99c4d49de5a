// libarchive does the reading: it knows the formats and checks what a header claims.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/packed_file.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <span>

#include "lln/error.h"
#include "lln_torch/data/archive_reader.h"

namespace lln_torch {
namespace {

[[noreturn]] void throw_unreadable(const std::string& path, const std::string& what) {
  throw lln::Error(lln::ErrorCode::io, path + ": " + what);
}

// The content of the entry that the reader stands at.
std::vector<std::uint8_t> read_entry(archive* reader, const std::string& path, std::uint64_t most) {
  std::vector<std::uint8_t> content;
  std::vector<std::uint8_t> block(kArchiveBlock);
  while (true) {
    const la_ssize_t got = archive_read_data(reader, block.data(), block.size());
    if (got == 0) return content;
    if (got < 0) {
      throw_unreadable(path,
                       fmt::format("after {} bytes: {}", content.size(), archive_reason(reader)));
    }
    if (content.size() + static_cast<std::uint64_t>(got) > most) {
      throw_unreadable(path, fmt::format("expected at most {} bytes, found more", most));
    }
    content.insert(content.end(), block.begin(), block.begin() + got);
  }
}

}  // namespace

std::string find_packed_file(const std::string& folder, const std::string& name) {
  for (const char* ending : {"", ".xz", ".gz", ".bz2", ".zst"}) {
    const std::filesystem::path path = std::filesystem::path(folder) / (name + ending);
    std::error_code ignored;
    if (std::filesystem::is_regular_file(path, ignored)) return path.string();
  }
  return "";
}

std::vector<std::uint8_t> read_packed_file(const std::string& path, std::uint64_t most) {
  const lln::io::InputFile file(path);  // says better than libarchive why a file cannot be opened
  const ArchiveReader reader = open_archive(path, ArchiveFormat::raw);
  if (next_archive_entry(reader.get(), path) == nullptr) return {};
  return read_entry(reader.get(), path, most);
}

TarFile::TarFile(const std::string& path,
                 const std::function<bool(const std::string& name)>& wanted,
                 std::uint64_t most_in_memory)
    : file_(path) {
  std::uint64_t in_memory = 0;
  const ArchiveReader reader = open_archive(path, ArchiveFormat::tar);
  while (archive_entry* entry = next_archive_entry(reader.get(), path)) {
    // The last filter is the file itself; one that comes before it decompresses.
    plain_ = archive_filter_count(reader.get()) == 1;
    const char* name = archive_entry_pathname(entry);
    if (name == nullptr || archive_entry_filetype(entry) != AE_IFREG || !wanted(name)) continue;
    const auto bytes = static_cast<std::uint64_t>(archive_entry_size(entry));
    if (bytes > kLargestMember) {
      throw_unreadable(path, fmt::format("{} claims {} bytes", name, bytes));
    }
    Member member{name, 0, bytes, {}};
    if (plain_) {
      member.offset = static_cast<std::uint64_t>(archive_filter_bytes(reader.get(), 0));
      if (member.offset + bytes > file_.bytes()) {
        throw_unreadable(path, fmt::format("{} ends at byte {}, the file at {}", name,
                                           member.offset + bytes, file_.bytes()));
      }
    } else {
      in_memory += bytes;
      if (in_memory > most_in_memory) {
        throw_unreadable(path, fmt::format("its files have more than {} bytes, which a compressed "
                                           "tar holds in memory: decompress it to a plain tar",
                                           most_in_memory));
      }
      // No more than the header says, so that the sum holds.
      member.content = read_entry(reader.get(), path + " " + name, bytes);
    }
    members_.push_back(std::move(member));
  }
}

std::vector<std::uint8_t> TarFile::read(std::size_t i) const {
  const Member& member = members_[i];
  if (!plain_) return member.content;
  std::vector<std::uint8_t> content(member.bytes);
  file_.read_at(member.offset, std::as_writable_bytes(std::span(content)), member.name);
  return content;
}

}  // namespace lln_torch
