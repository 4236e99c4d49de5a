// Pictures, tars and compressed files that the tests of readers write for themselves.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <archive.h>
#include <archive_entry.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

#include <jpeglib.h>

namespace lln_torch::test {

// A folder of this test, empty at the start and removed at the end.
class Folder {
 public:
  Folder()
      : path_(std::filesystem::path(testing::TempDir()) /
              (std::string("lln_data_") +
               testing::UnitTest::GetInstance()->current_test_info()->test_suite_name() + "_" +
               testing::UnitTest::GetInstance()->current_test_info()->name() + "_" +
               std::to_string(count_++))) {
    std::filesystem::remove_all(path_);
    std::filesystem::create_directories(path_);
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  std::string path() const { return path_.string(); }
  std::string operator/(const std::string& name) const { return (path_ / name).string(); }
  void write(const std::string& name, const std::vector<std::uint8_t>& bytes) const {
    std::filesystem::create_directories((path_ / name).parent_path());
    std::ofstream(path_ / name, std::ios::binary)
        .write(reinterpret_cast<const char*>(bytes.data()),
               static_cast<std::streamsize>(bytes.size()));
  }

 private:
  static inline int count_ = 0;  // a test may have several
  std::filesystem::path path_;
};

// [height, width, channels] of 1, 3 or 4 channels, in the best quality.
inline std::vector<std::uint8_t> jpeg_of(int height, int width, int channels,
                                         const std::vector<std::uint8_t>& pixels) {
  jpeg_compress_struct encoder{};
  jpeg_error_mgr faults{};
  encoder.err = jpeg_std_error(&faults);
  jpeg_create_compress(&encoder);
  unsigned char* memory = nullptr;
  unsigned long size = 0;
  jpeg_mem_dest(&encoder, &memory, &size);
  encoder.image_height = static_cast<JDIMENSION>(height);
  encoder.image_width = static_cast<JDIMENSION>(width);
  encoder.input_components = channels;
  encoder.in_color_space = channels == 1 ? JCS_GRAYSCALE : channels == 3 ? JCS_RGB : JCS_CMYK;
  jpeg_set_defaults(&encoder);
  jpeg_set_quality(&encoder, 100, TRUE);
  jpeg_start_compress(&encoder, TRUE);
  std::vector<std::uint8_t> copy = pixels;
  while (encoder.next_scanline < encoder.image_height) {
    JSAMPROW row = copy.data() + encoder.next_scanline * static_cast<std::size_t>(width * channels);
    jpeg_write_scanlines(&encoder, &row, 1);
  }
  jpeg_finish_compress(&encoder);
  std::vector<std::uint8_t> bytes(memory, memory + size);
  jpeg_destroy_compress(&encoder);
  std::free(memory);
  return bytes;
}

// One colour, with a white left half where `half` says so.
inline std::vector<std::uint8_t> plain_jpeg(int height, int width, std::uint8_t red,
                                            std::uint8_t green, std::uint8_t blue,
                                            bool half = false) {
  std::vector<std::uint8_t> pixels;
  for (int row = 0; row < height; ++row) {
    for (int column = 0; column < width; ++column) {
      const bool white = half && column < width / 2;
      for (const std::uint8_t value : {red, green, blue}) pixels.push_back(white ? 255 : value);
    }
  }
  return jpeg_of(height, width, 3, pixels);
}

using Members = std::vector<std::pair<std::string, std::vector<std::uint8_t>>>;

// A tar, compressed with xz where `packed` says so.
inline void write_tar(const std::string& path, const Members& members, bool packed) {
  archive* writer = archive_write_new();
  if (packed) archive_write_add_filter_xz(writer);
  archive_write_set_format_pax_restricted(writer);
  ASSERT_EQ(archive_write_open_filename(writer, path.c_str()), ARCHIVE_OK);
  for (const auto& [name, bytes] : members) {
    archive_entry* entry = archive_entry_new();
    archive_entry_set_pathname(entry, name.c_str());
    archive_entry_set_size(entry, static_cast<la_int64_t>(bytes.size()));
    archive_entry_set_filetype(entry, AE_IFREG);
    archive_entry_set_perm(entry, 0644);
    ASSERT_EQ(archive_write_header(writer, entry), ARCHIVE_OK);
    archive_write_data(writer, bytes.data(), bytes.size());
    archive_entry_free(entry);
  }
  archive_write_close(writer);
  archive_write_free(writer);
}

inline void write_xz(const std::string& path, const std::vector<std::uint8_t>& bytes) {
  archive* writer = archive_write_new();
  archive_write_add_filter_xz(writer);
  archive_write_set_format_raw(writer);
  ASSERT_EQ(archive_write_open_filename(writer, path.c_str()), ARCHIVE_OK);
  archive_entry* entry = archive_entry_new();
  archive_entry_set_filetype(entry, AE_IFREG);
  ASSERT_EQ(archive_write_header(writer, entry), ARCHIVE_OK);
  archive_write_data(writer, bytes.data(), bytes.size());
  archive_entry_free(entry);
  archive_write_close(writer);
  archive_write_free(writer);
}

}  // namespace lln_torch::test
