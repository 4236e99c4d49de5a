// libjpeg reports faults through a handler that must not return, so it jumps: between setjmp and
// the jump there are only C structures and memory that the caller owns.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/jpeg.h"

#include <fmt/format.h>

// jpeglib.h needs FILE and size_t, and does not include them itself.
#include <csetjmp>
#include <cstddef>
#include <cstdio>

#include <jerror.h>
#include <jpeglib.h>

#include <algorithm>
#include <memory>

#include "lln/error.h"

namespace lln_torch {
namespace {

constexpr std::int64_t kMostJpegPixels = std::int64_t{1} << 28;

struct JpegReader {
  jpeg_decompress_struct decoder;
  jpeg_error_mgr faults;
  std::jmp_buf back;
  char text[JMSG_LENGTH_MAX];  // why decoding stopped
};

JpegReader& jpeg_reader_of(j_common_ptr decoder) {
  return *static_cast<JpegReader*>(decoder->client_data);
}

[[noreturn]] void stop_jpeg(j_common_ptr decoder) {
  JpegReader& reader = jpeg_reader_of(decoder);
  decoder->err->format_message(decoder, reader.text);
  std::longjmp(reader.back, 1);
}

// Level -1 is a warning: libjpeg would go on and fill what is missing with grey.
void watch_jpeg(j_common_ptr decoder, int level) {
  if (level >= 0) return;
  ++decoder->err->num_warnings;
  if (decoder->err->msg_code != JWRN_EXTRANEOUS_DATA) stop_jpeg(decoder);
}

void silence_jpeg(j_common_ptr /*decoder*/) {}

// Makes the decoder and reads the header; false after a fault. Making it may be one as well (a
// library of another version), and keeps the pointer to the reader.
bool open_jpeg(JpegReader& reader, std::span<const std::uint8_t> file) {
  reader.decoder.client_data = &reader;
  if (setjmp(reader.back) != 0) return false;
  jpeg_create_decompress(&reader.decoder);
  jpeg_mem_src(&reader.decoder, file.data(), static_cast<unsigned long>(file.size()));
  jpeg_read_header(&reader.decoder, TRUE);
  return true;
}

// Chooses colours and size; false after a fault.
bool scale_jpeg(JpegReader& reader, std::int64_t channels, std::int64_t short_side) {
  if (setjmp(reader.back) != 0) return false;
  jpeg_decompress_struct& decoder = reader.decoder;
  const bool four = decoder.jpeg_color_space == JCS_CMYK || decoder.jpeg_color_space == JCS_YCCK;
  decoder.out_color_space = four ? JCS_CMYK : channels == 1 ? JCS_GRAYSCALE : JCS_RGB;
  const auto shorter =
      static_cast<std::int64_t>(std::min(decoder.image_width, decoder.image_height));
  decoder.scale_denom = 1;
  while (short_side > 0 && decoder.scale_denom < 8 &&
         shorter / (2 * static_cast<std::int64_t>(decoder.scale_denom)) >= short_side) {
    decoder.scale_denom *= 2;
  }
  jpeg_calc_output_dimensions(&decoder);
  return true;
}

bool read_jpeg_rows(JpegReader& reader, std::uint8_t* rows, std::size_t row_bytes) {
  if (setjmp(reader.back) != 0) return false;
  jpeg_start_decompress(&reader.decoder);
  while (reader.decoder.output_scanline < reader.decoder.output_height) {
    JSAMPROW row = rows + reader.decoder.output_scanline * row_bytes;
    jpeg_read_scanlines(&reader.decoder, &row, 1);
  }
  jpeg_finish_decompress(&reader.decoder);
  return true;
}

struct DestroyJpegReader {
  void operator()(JpegReader* reader) const {
    jpeg_destroy_decompress(&reader->decoder);
    delete reader;
  }
};

[[noreturn]] void throw_bad_jpeg(const std::string& name, const std::string& what) {
  throw lln::Error(lln::ErrorCode::io, fmt::format("{}: not a good JPEG: {}", name, what));
}

// Cyan, magenta, yellow and black as Adobe stores them, upside down: 255 is no ink.
void four_inks_to_channels(Picture& picture, std::int64_t channels) {
  std::vector<std::uint8_t> bytes;
  bytes.reserve(picture.bytes.size() / 4 * static_cast<std::size_t>(channels));
  for (std::size_t i = 0; i + 3 < picture.bytes.size(); i += 4) {
    int colour[3];
    for (std::size_t c = 0; c < 3; ++c) {
      colour[c] = picture.bytes[i + c] * picture.bytes[i + 3] / 255;
    }
    if (channels == 1) {
      bytes.push_back(static_cast<std::uint8_t>(
          (299 * colour[0] + 587 * colour[1] + 114 * colour[2] + 500) / 1000));
    } else {
      for (const int value : colour) bytes.push_back(static_cast<std::uint8_t>(value));
    }
  }
  picture.bytes = std::move(bytes);
  picture.channels = channels;
}

}  // namespace

Picture decode_jpeg(std::span<const std::uint8_t> file, const std::string& name,
                    std::int64_t channels, std::int64_t short_side) {
  if (file.size() < 2 || file[0] != 0xFF || file[1] != 0xD8) {
    std::string start;
    for (const std::uint8_t byte : file.first(std::min<std::size_t>(file.size(), 4))) {
      start += fmt::format(" {:02X}", byte);
    }
    throw_bad_jpeg(name, fmt::format("expected a file that starts with FF D8, found {} bytes{}{}",
                                     file.size(), start.empty() ? "" : " that start with", start));
  }
  std::unique_ptr<JpegReader, DestroyJpegReader> reader(new JpegReader());
  reader->decoder.err = jpeg_std_error(&reader->faults);
  reader->faults.error_exit = stop_jpeg;
  reader->faults.emit_message = watch_jpeg;
  reader->faults.output_message = silence_jpeg;

  if (!open_jpeg(*reader, file)) throw_bad_jpeg(name, reader->text);
  // Of the whole picture: a progressive one is decoded at its full size before it is made smaller.
  const auto height = static_cast<std::int64_t>(reader->decoder.image_height);
  const auto width = static_cast<std::int64_t>(reader->decoder.image_width);
  if (height * width > kMostJpegPixels) {
    throw_bad_jpeg(name, fmt::format("{} x {} pixels, and at most {} are taken", width, height,
                                     kMostJpegPixels));
  }
  if (!scale_jpeg(*reader, channels, short_side)) throw_bad_jpeg(name, reader->text);
  Picture picture;
  picture.height = reader->decoder.output_height;
  picture.width = reader->decoder.output_width;
  picture.channels = reader->decoder.out_color_components;
  const auto row_bytes = static_cast<std::size_t>(picture.width * picture.channels);
  picture.bytes.resize(row_bytes * static_cast<std::size_t>(picture.height));
  if (!read_jpeg_rows(*reader, picture.bytes.data(), row_bytes)) throw_bad_jpeg(name, reader->text);
  if (picture.channels == 4) four_inks_to_channels(picture, channels);
  return picture;
}

}  // namespace lln_torch
