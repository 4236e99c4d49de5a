// Which filters and formats are understood: all compressions, and formats as asked for, since one
// that nobody expects would only hide a wrong file.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/archive_reader.h"

#include <filesystem>

#include "lln/error.h"

namespace lln_torch {
namespace {

[[noreturn]] void throw_no_archive(const std::string& path, const std::string& what) {
  throw lln::Error(lln::ErrorCode::io, path + ": " + what);
}

}  // namespace

std::string archive_reason(archive* reader) {
  const char* text = archive_error_string(reader);
  return text == nullptr ? "cannot be read" : text;
}

ArchiveReader open_archive(const std::string& path, ArchiveFormat format) {
  std::error_code code;
  const std::filesystem::file_status status = std::filesystem::status(path, code);
  if (!std::filesystem::exists(status)) throw_no_archive(path, "cannot be opened: no such file");
  if (!std::filesystem::is_regular_file(status)) throw_no_archive(path, "is not a regular file");
  ArchiveReader reader(archive_read_new());
  if (!reader) throw lln::Error(lln::ErrorCode::out_of_memory, path + ": no memory to read it");
  archive_read_support_filter_all(reader.get());
  switch (format) {
    case ArchiveFormat::raw:
      archive_read_support_format_raw(reader.get());
      archive_read_support_format_empty(reader.get());
      break;
    case ArchiveFormat::tar:
      archive_read_support_format_tar(reader.get());
      break;
    case ArchiveFormat::any:
      archive_read_support_format_all(reader.get());
      break;
  }
  if (archive_read_open_filename(reader.get(), path.c_str(), kArchiveBlock) != ARCHIVE_OK) {
    throw_no_archive(path, archive_reason(reader.get()));
  }
  return reader;
}

archive_entry* next_archive_entry(archive* reader, const std::string& name) {
  archive_entry* entry = nullptr;
  const int result = archive_read_next_header(reader, &entry);
  if (result == ARCHIVE_EOF) return nullptr;
  if (result != ARCHIVE_OK && result != ARCHIVE_WARN) {
    throw_no_archive(name, archive_reason(reader));
  }
  return entry;
}

}  // namespace lln_torch
