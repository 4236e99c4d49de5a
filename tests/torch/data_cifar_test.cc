// CIFAR-10 in grey: both layouts of files, compressed or not, what is held out, and files that are
// not what they should be.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <set>

#include "expect_error.h"
#include "lln_torch/config/settings.h"
#include "lln_torch/data/batch.h"
#include "written_pictures.h"

namespace lln_torch {
namespace {

using test::Folder;

std::unique_ptr<Source> cifar(const Folder& folder, const std::string& more = "") {
  return make_source(Settings::from_toml("task = 'cifar10-grey'\n" + more, "test"), folder.path());
}

// Record i: label i mod 10, all pixels i mod 251.
std::vector<std::uint8_t> grey_records(int first, int count) {
  std::vector<std::uint8_t> bytes;
  for (int i = first; i < first + count; ++i) {
    bytes.push_back(static_cast<std::uint8_t>(i % 10));
    bytes.insert(bytes.end(), 1024, static_cast<std::uint8_t>(i % 251));
  }
  return bytes;
}

TEST(CifarGrey, ReadsPlainAndCompressedFiles) {
  const Folder plain;
  plain.write("cifar10_gray_train.bin", grey_records(0, 100));
  plain.write("cifar10_gray_test.bin", grey_records(200, 20));
  const auto source = cifar(plain);
  EXPECT_EQ(source->task().vocabulary, 256);
  EXPECT_EQ(source->task().max_tokens, 1024);
  EXPECT_EQ(source->validation_rows(), 10);
  EXPECT_DOUBLE_EQ(source->steps_per_epoch(9), 10);
  EXPECT_DOUBLE_EQ(source->task().chance, 0.1);
  const Batch held_out = source->validation_batch(0, 10);
  for (int i = 0; i < 10; ++i) {
    EXPECT_EQ(held_out.labels[static_cast<std::size_t>(i)], i);
    EXPECT_EQ(held_out.text.ids[static_cast<std::size_t>(i * 1024 + 5)], 90 + i);
  }
  const Batch test = cifar(plain, "validation_split = 'test'")->validation_batch(0, 20);
  EXPECT_EQ(test.text.ids[0], 200);
  EXPECT_EQ(test.rows, 20);

  const Folder packed;
  test::write_xz(packed / "cifar10_gray_train.bin.xz", grey_records(0, 100));
  EXPECT_EQ(cifar(packed)->train_batch(3, 8, 0, 8).text.ids,
            source->train_batch(3, 8, 0, 8).text.ids);
}

TEST(CifarGrey, AnEpochShowsEveryExampleOnceAndNoneThatIsHeldOut) {
  const Folder folder;
  folder.write("cifar10_gray_train.bin", grey_records(0, 100));
  const auto source = cifar(folder, "validation_rows = 40");
  std::multiset<std::int32_t> seen;
  for (std::int64_t step = 0; step < 10; ++step) {
    const Batch batch = source->train_batch(step, 6, 0, 6);
    for (std::size_t i = 0; i < 6; ++i) {
      seen.insert(batch.text.ids[i * 1024]);
      EXPECT_EQ(batch.labels[i], batch.text.ids[i * 1024] % 10);
    }
  }
  EXPECT_EQ(std::set<std::int32_t>(seen.begin(), seen.end()).size(), 60u);
  EXPECT_LT(*seen.rbegin(), 60);
}

TEST(CifarGrey, OfficialBatchesAreTurnedGrey) {
  const Folder folder;
  for (int file = 1; file <= 5; ++file) {
    std::vector<std::uint8_t> bytes;
    for (int i = 0; i < 4; ++i) {
      bytes.push_back(static_cast<std::uint8_t>(file));
      bytes.insert(bytes.end(), 1024, 200);  // red
      bytes.insert(bytes.end(), 1024, 100);  // green
      bytes.insert(bytes.end(), 1024, 50);   // blue
    }
    folder.write("cifar-10-batches-bin/data_batch_" + std::to_string(file) + ".bin", bytes);
  }
  const auto source = cifar(folder, "form = 'pixels'\nmean = 0\ndeviation = 1");
  EXPECT_EQ(source->task().vocabulary, 0);
  EXPECT_EQ(source->task().channels, 1);
  const Batch batch = source->train_batch(0, 4, 0, 4);
  ASSERT_EQ(batch.pixels.size(), 4u * 1024);
  // .2989 x 200 + .587 x 100 + .114 x 50 = 124.18
  for (const float pixel : batch.pixels) EXPECT_FLOAT_EQ(pixel, 124.0F / 255);
}

TEST(CifarGrey, BadFilesAreReportedWithTheirPlace) {
  const Folder empty;
  lln::test::expect_error([&] { cifar(empty); },
                          {empty.path(), "cifar10_gray_train.bin", "data_batch_1.bin", "--data"},
                          lln::ErrorCode::io);
  const Folder cut;
  std::vector<std::uint8_t> bytes = grey_records(0, 3);
  bytes.pop_back();
  cut.write("cifar10_gray_train.bin", bytes);
  lln::test::expect_error([&] { cifar(cut); },
                          {"cifar10_gray_train.bin", "1025 bytes", "2 records and 1024 bytes left"},
                          lln::ErrorCode::io);
  const Folder label;
  bytes = grey_records(0, 3);
  bytes[1025] = 77;
  label.write("cifar10_gray_train.bin", bytes);
  lln::test::expect_error([&] { cifar(label); }, {"record 1", "byte 1025", "0 to 9", "77"},
                          lln::ErrorCode::io);
  const Folder packed;
  test::write_xz(packed / "cifar10_gray_train.bin.xz", grey_records(0, 200));
  const auto size = std::filesystem::file_size(packed / "cifar10_gray_train.bin.xz");
  std::filesystem::resize_file(packed / "cifar10_gray_train.bin.xz", size / 2);
  lln::test::expect_error([&] { cifar(packed); }, {"cifar10_gray_train.bin.xz"},
                          lln::ErrorCode::io);
}

}  // namespace
}  // namespace lln_torch
