// Small files for the tests of data: a folder that goes away, text plain and compressed, archives.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <archive.h>
#include <archive_entry.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "expect_error.h"
#include "io/scratch_folder.h"

namespace lln_torch {

using lln::io::read_bytes;
using lln::test::error_of;

class TemporaryFolder {
 public:
  std::string path(const std::string& name = "") const { return folder_.file(name); }
  std::string write(const std::string& name, const std::string& content) const {
    std::filesystem::create_directories((folder_.path() / name).parent_path());
    lln::io::write_bytes(path(name), content);
    return path(name);
  }

 private:
  lln::io::ScratchFolder folder_;
};

// A tar.xz of files by name, or with one file of no name its text as .xz.
inline std::string write_compressed(const std::string& path,
                                    const std::vector<std::pair<std::string, std::string>>& files) {
  archive* writer = archive_write_new();
  archive_write_add_filter_xz(writer);
  if (files.front().first.empty()) {
    archive_write_set_format_raw(writer);
  } else {
    archive_write_set_format_ustar(writer);
  }
  EXPECT_EQ(archive_write_open_filename(writer, path.c_str()), ARCHIVE_OK);
  for (const auto& [name, content] : files) {
    archive_entry* entry = archive_entry_new();
    archive_entry_set_pathname(entry, name.empty() ? "data" : name.c_str());
    archive_entry_set_filetype(entry, AE_IFREG);
    archive_entry_set_perm(entry, 0644);
    archive_entry_set_size(entry, static_cast<la_int64_t>(content.size()));
    EXPECT_EQ(archive_write_header(writer, entry), ARCHIVE_OK);
    archive_write_data(writer, content.data(), content.size());
    archive_entry_free(entry);
  }
  archive_write_free(writer);
  return path;
}

}  // namespace lln_torch
