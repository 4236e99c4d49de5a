// libarchive as everything here uses it: opened with a reason where that fails, freed by itself,
// its faults as lln::Error.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <archive.h>
#include <archive_entry.h>

#include <cstddef>
#include <memory>
#include <string>

namespace lln_torch {

constexpr std::size_t kArchiveBlock = std::size_t{1} << 18;   // bytes that are read at once
constexpr std::size_t kLargestMember = std::size_t{1} << 30;  // of an archive, in bytes

struct FreeArchive {
  void operator()(archive* reader) const { archive_read_free(reader); }
};
using ArchiveReader = std::unique_ptr<archive, FreeArchive>;

enum class ArchiveFormat {
  raw,  // one file, maybe compressed
  tar,
  any,
};

// Throws lln::Error (io) where the file is not there or cannot be read.
ArchiveReader open_archive(const std::string& path, ArchiveFormat format);
// The next entry, null after the last; a fault is an Error about `name`.
archive_entry* next_archive_entry(archive* reader, const std::string& name);
// Why the last call failed.
std::string archive_reason(archive* reader);

}  // namespace lln_torch
