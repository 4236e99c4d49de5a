// Decoding of JPEG files with libjpeg-turbo. A fault is an lln::Error with the name of the file;
// libjpeg's own handler would end the program.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace lln_torch {

struct Picture {
  std::int64_t channels = 0;
  std::int64_t height = 0;
  std::int64_t width = 0;
  std::vector<std::uint8_t> bytes;  // [height, width, channels]
};

// `channels` 3 (RGB) or 1 (grey). A picture whose shorter side is more than twice `short_side` is
// reduced while it is decoded, by 2, 4 or 8, and never below it; 0: as it is. Throws lln::Error
// (io) where data are missing or broken; bytes that are only superfluous are passed over.
Picture decode_jpeg(std::span<const std::uint8_t> file, const std::string& name,
                    std::int64_t channels, std::int64_t short_side = 0);

}  // namespace lln_torch
