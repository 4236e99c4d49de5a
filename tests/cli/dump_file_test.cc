// Random damage to dumps of queries and keys: the reader refuses a file with an Error, or every
// number of every layer can be read through its views.
// SPDX-License-Identifier: Apache-2.0
#include "dump_file.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>

#include "io/damage.h"
#include "io/scratch_folder.h"
#include "lln/error.h"
#include "lln/moments.h"

namespace lln::cli {
namespace {

const std::vector<std::string> kPieces = {
    "{",           "}",       "[",       "]",       ",",        "\"",      "0",
    "1",           "2",       "\"F64\"", "\"F16\"", "\"BF16\"", "\"I32\"", "[2,1,3,2]",
    "\"shape\":[", "\"a.q\"", ".q",      ".k",      "alpha",    "\xff",    "4294967296"};

std::string valid_dump(const io::ScratchFolder& folder) {
  std::vector<float> values(12, 0.5F);
  values[3] = -2;
  const auto bytes = std::as_bytes(std::span(values));
  const std::vector<io::TensorToWrite> tensors = {{"a.q", "F32", {1, 2, 3, 2}, bytes},
                                                  {"a.k", "F32", {1, 1, 3, 2}, bytes.first(24)},
                                                  {"q", "BF16", {2, 3, 2}, bytes.first(24)},
                                                  {"k", "BF16", {2, 3, 2}, bytes.first(24)},
                                                  {"alpha", "F32", {2}, bytes.first(8)}};
  io::write_safetensors(folder.file("valid"), tensors);
  return io::read_bytes(folder.file("valid"));
}

void expect_readable(const DumpLayer& layer) {
  const ConstView q = layer.q.view, k = layer.k.view;
  ASSERT_EQ(q.shape[0], k.shape[0]);
  ASSERT_EQ(q.shape[3], k.shape[3]);
  ASSERT_EQ(q.shape[1] % k.shape[1], 0);
  for (const ConstView& x : {q, k}) {
    std::vector<Moments> moments(static_cast<std::size_t>(x.shape[0] * x.shape[1]));
    head_moments({.x = x}, moments);
    for (const Moments& m : moments) {
      EXPECT_TRUE(std::isfinite(m.mean));
      EXPECT_EQ(m.count, static_cast<double>(x.shape[2] * x.shape[3]));
    }
  }
}

TEST(DumpFileTest, DamagedFilesAreRefusedOrReadInFull) {
  const io::ScratchFolder folder;
  const std::string valid = valid_dump(folder), path = folder.file("damaged");
  std::mt19937 random(20240503);
  int accepted = 0, refused = 0;
  constexpr int kFiles = 4000;
  for (int i = 0; i < kFiles; ++i) {
    io::write_bytes(path, io::damaged(valid, kPieces, random));
    try {
      const DumpOptions options{.file = path};
      const std::unique_ptr<io::TensorSource> source = open_dump(options);
      const DumpFile dump(*source, options);
      ASSERT_FALSE(dump.layers().empty());
      for (std::size_t layer = 0; layer < dump.layers().size(); ++layer) {
        expect_readable(dump.read(layer));
      }
      ++accepted;
    } catch (const Error& e) {
      EXPECT_EQ(std::string(e.what()).rfind(path + ": ", 0), 0U) << e.what();
      ++refused;
    }
  }
  // The damage must reach both sides of the reader to mean anything.
  EXPECT_GT(accepted, kFiles / 100);
  EXPECT_GT(refused, kFiles / 2);
}

TEST(DumpFileTest, ScalesBelongToTheirLayer) {
  const io::ScratchFolder folder;
  valid_dump(folder);
  DumpOptions options{.file = folder.file("valid")};
  const std::unique_ptr<io::TensorSource> source = open_dump(options);
  const DumpFile dump(*source, options);
  ASSERT_EQ(dump.layers(), (std::vector<std::string>{"", "a"}));
  const DumpLayer first = dump.read(0), second = dump.read(1);
  EXPECT_EQ(first.alpha.view.shape, (Shape{1, 2, 1, 1}));
  EXPECT_FALSE(first.beta.view.given());
  EXPECT_FALSE(second.alpha.view.given());
  EXPECT_EQ(second.q.view.shape, (Shape{1, 2, 3, 2}));
  EXPECT_EQ(static_cast<const float*>(second.q.view.data)[3], -2);
  try {
    const DumpFile frozen(*source, options, {.scales = true});
    FAIL();
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find(
                  "3 faults: 'beta' is missing; 'a.alpha' is missing; 'a.beta' is missing"),
              std::string::npos)
        << e.what();
  }
}

}  // namespace
}  // namespace lln::cli
