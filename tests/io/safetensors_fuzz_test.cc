// Random damage to valid files, bounded and reproducible: the reader either accepts a file, and
// then every tensor of it can be read, or throws lln::Error; and it never allocates by a claimed
// length. Separate because it replaces the allocation functions to watch them.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <random>

#include "damage.h"
#include "io/safetensors.h"
#include "lln/error.h"
#include "scratch_folder.h"
#include "watched_allocation.h"

namespace lln::io {
namespace {

// Pieces that make damage interesting: numbers at limits, structure, fragments of the format.
const std::vector<std::string> kPieces = {"{",
                                          "}",
                                          "[",
                                          "]",
                                          ",",
                                          ":",
                                          "\"",
                                          "-",
                                          "0",
                                          "1",
                                          "4",
                                          "18446744073709551615",
                                          "9223372036854775807",
                                          "4294967296",
                                          "1e308",
                                          "null",
                                          "true",
                                          "\"dtype\":",
                                          "\"shape\":[",
                                          "\"data_offsets\":[",
                                          "\"F64\"",
                                          "\"BOOL\"",
                                          "\"__metadata__\":{",
                                          std::string("\0", 1),
                                          "\xff",
                                          "\\u0000",
                                          "[[[[[[[["};

std::string valid_file(const ScratchFolder& folder) {
  const std::vector<float> values(12, 1.5F);
  const std::vector<std::int64_t> lengths = {3, 5};
  const auto bytes = std::as_bytes(std::span(values));
  const std::vector<TensorToWrite> tensors = {
      {"q", "F32", {1, 2, 3, 2}, bytes},
      {"mask", "BOOL", {2, 5}, bytes.first(10)},
      {"half", "BF16", {3, 2}, bytes.first(12)},
      {"key_lengths", "I64", {2}, std::as_bytes(std::span(lengths))}};
  write_safetensors(folder.file("valid"), tensors, {{"producer", "test"}});
  return read_bytes(folder.file("valid"));
}

TEST(SafetensorsFuzz, DamagedFilesAreRefusedOrReadInFull) {
  const ScratchFolder folder;
  const std::string valid = valid_file(folder);
  const std::string path = folder.file("damaged");
  std::mt19937 random(20240501);
  int accepted = 0, refused = 0;
  constexpr int kFiles = 4000;
  for (int i = 0; i < kFiles; ++i) {
    const std::string bytes = damaged(valid, kPieces, random);
    write_bytes(path, bytes);
    test::largest_allocation_reset();
    try {
      const SafetensorsReader reader(path);
      for (const TensorInfo& t : reader.tensors()) {
        if (element_bytes(t.dtype) == 0) continue;
        ASSERT_EQ(reader.read(t).size(), t.bytes());
      }
      ++accepted;
    } catch (const Error& e) {
      EXPECT_EQ(std::string(e.what()).rfind(path + ": ", 0), 0U) << e.what();
      ++refused;
    }
    // 4096: error texts, the parser's own buffers.
    ASSERT_LE(test::largest_allocation(), 4 * bytes.size() + 4096) << "file " << i;
  }
  // The mutations must reach both sides of the reader to mean anything.
  EXPECT_GT(accepted, kFiles / 100);
  EXPECT_GT(refused, kFiles / 2);
}

}  // namespace
}  // namespace lln::io
