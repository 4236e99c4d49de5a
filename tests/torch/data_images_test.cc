// JPEG folders and tars: what is read, decoded, cut and normalised; files that are broken; batches
// that do not depend on what was asked for before.
// SPDX-License-Identifier: Apache-2.0
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <set>

#include "expect_error.h"
#include "lln_torch/data/augment.h"
#include "lln_torch/data/batch.h"
#include "lln_torch/data/image_files.h"
#include "lln_torch/data/jpeg.h"
#include "lln_torch/data/picture_cache.h"
#include "written_pictures.h"

namespace lln_torch {
namespace {

using test::Folder;

std::unique_ptr<Source> images(const std::string& path, const std::string& more = "") {
  return make_source(Settings::from_toml("task = 'images'\nsize = 16\n" + more, "test"), path);
}

// Twelve pictures a class: cats red and dogs blue, each a little different; two of each to test.
test::Members animals() {
  test::Members members;
  for (int i = 0; i < 12; ++i) {
    const auto shade = static_cast<std::uint8_t>(100 + 10 * i);
    const std::string name = std::to_string(i) + ".jpg";
    members.emplace_back("train/dog/" + name, test::plain_jpeg(20, 24, 0, 0, shade, true));
    members.emplace_back("train/cat/" + name, test::plain_jpeg(24, 20, shade, 0, 0));
    if (i >= 2) continue;
    members.emplace_back("test/dog/" + name, test::plain_jpeg(16, 16, 0, 0, shade));
    members.emplace_back("test/cat/" + name, test::plain_jpeg(16, 16, shade, 0, 0));
  }
  members.emplace_back("train/cat/notes.txt", std::vector<std::uint8_t>{'x'});
  return members;
}

void write_folder(const Folder& folder, const test::Members& members) {
  for (const auto& [name, bytes] : members) folder.write(name, bytes);
}

TEST(Images, FolderTarAndCompressedTarGiveTheSame) {
  const Folder folder;
  write_folder(folder, animals());
  const Folder tars;
  test::Members deep = animals();
  // A name too long for a plain header, and a folder above.
  for (auto& [name, bytes] : deep) name = "./" + std::string(120, 'x') + "/" + name;
  test::write_tar(tars / "a.tar", animals(), false);
  test::write_tar(tars / "b.tar.xz", animals(), true);
  test::write_tar(tars / "c.tar", deep, false);
  const auto expected = images(folder.path());
  EXPECT_EQ(expected->task().classes, 2);
  EXPECT_EQ(expected->task().channels, 3);
  EXPECT_EQ(expected->validation_rows(), 2);  // a tenth of 24
  EXPECT_DOUBLE_EQ(expected->steps_per_epoch(11), 2);
  for (const char* tar : {"a.tar", "b.tar.xz", "c.tar"}) {
    const auto source = images(tars.path(), std::string("set = '") + tar + "'");
    const Batch a = source->train_batch(2, 5, 0, 5);
    const Batch b = expected->train_batch(2, 5, 0, 5);
    EXPECT_EQ(a.pixels, b.pixels) << tar;
    EXPECT_EQ(a.labels, b.labels) << tar;
    EXPECT_EQ(source->validation_batch(0, 2).pixels, expected->validation_batch(0, 2).pixels);
  }
}

TEST(Images, ColoursLabelsAndNormalisation) {
  const Folder folder;
  write_folder(folder, animals());
  const auto source = images(folder.path(), "validation_split = 'test'\nmean = 0\ndeviation = 1");
  EXPECT_EQ(source->validation_rows(), 4);
  EXPECT_THAT(source->task().chance_text, testing::HasSubstr("cat 50.0%, dog 50.0%"));
  const Batch batch = source->validation_batch(0, 4);
  EXPECT_EQ(batch.labels, (std::vector<std::int32_t>{0, 0, 1, 1}));
  ASSERT_EQ(batch.pixels.size(), 4u * 3 * 256);
  for (std::size_t i = 0; i < 256; ++i) {  // the second cat is (110, 0, 0)
    EXPECT_NEAR(batch.pixels[3 * 256 + i], 110 / 255.0, 0.02);
    EXPECT_NEAR(batch.pixels[4 * 256 + i], 0, 0.02);
    EXPECT_NEAR(batch.pixels[5 * 256 + i], 0, 0.02);
  }
  const auto usual = images(folder.path(), "validation_split = 'test'\ngrey = true");
  EXPECT_EQ(usual->task().channels, 1);
  EXPECT_NEAR(usual->validation_batch(1, 1).pixels[0], 2 * 0.299 * 110 / 255.0 - 1, 0.03);
}

TEST(Images, ABatchDependsOnItsStepAloneWhateverIsCached) {
  const Folder folder;
  write_folder(folder, animals());
  const auto first = images(folder.path(), "cache_mb = 0");
  const auto second = images(folder.path());
  for (std::int64_t step = 0; step < 3; ++step) second->train_batch(step, 5, 0, 5);
  const Batch a = first->train_batch(3, 5, 0, 5);
  const Batch b = second->train_batch(3, 5, 0, 5);
  EXPECT_EQ(a.pixels, b.pixels);
  EXPECT_EQ(a.labels, b.labels);
  const Batch part = first->train_batch(3, 5, 2, 2);
  EXPECT_TRUE(std::equal(part.pixels.begin(), part.pixels.end(), b.pixels.begin() + 2 * 3 * 256));
  // The same pictures in the next epoch are seen differently.
  EXPECT_NE(images(folder.path(), "seed = 1")->train_batch(3, 5, 0, 5).pixels, a.pixels);
}

TEST(Images, AValidationFolderIsUsedAndNothingIsHeldOut) {
  const Folder folder;
  write_folder(folder, animals());
  folder.write("val/cat/a.JPEG", test::plain_jpeg(16, 16, 1, 2, 3));
  const auto source = images(folder.path());
  EXPECT_EQ(source->validation_rows(), 1);
  EXPECT_DOUBLE_EQ(source->steps_per_epoch(24), 1);
}

TEST(Images, BrokenFilesAreReportedByName) {
  const auto with = [](const std::string& name, const std::vector<std::uint8_t>& bytes) {
    const Folder folder;
    write_folder(folder, animals());
    folder.write("val/cat/" + name, bytes);
    images(folder.path())->validation_batch(0, 1);
  };
  const std::vector<std::uint8_t> good = test::plain_jpeg(64, 64, 10, 20, 30, true);
  std::vector<std::uint8_t> half(good.begin(), good.begin() + static_cast<long>(good.size() / 2));
  std::vector<std::uint8_t> head(good.begin(), good.begin() + 30);
  std::vector<std::uint8_t> torn = good;
  for (std::size_t i = 180; i < 400; ++i) torn[i] = static_cast<std::uint8_t>(i * 37);
  const auto io = lln::ErrorCode::io;
  lln::test::expect_error([&] { with("half.jpg", half); }, {"half.jpg", "remature end"}, io);
  lln::test::expect_error([&] { with("head.jpg", head); }, {"head.jpg", "not a good JPEG"}, io);
  lln::test::expect_error([&] { with("torn.jpg", torn); }, {"torn.jpg", "not a good JPEG"}, io);
  lln::test::expect_error(
      [&] {
        with("png.jpg", {0x89, 'P', 'N', 'G', 0x0D});
      },
      {"png.jpg", "FF D8", "5 bytes", "89 50 4E 47"}, io);
  lln::test::expect_error([&] { with("empty.jpg", {}); }, {"empty.jpg", "0 bytes"}, io);
}

TEST(Images, EveryCutOfAFileIsAnErrorOrAPicture) {
  const std::vector<std::uint8_t> good = test::plain_jpeg(24, 24, 200, 20, 30, true);
  int refused = 0;
  for (std::size_t size = 0; size < good.size(); ++size) {
    try {
      decode_jpeg(std::span(good).first(size), "cut.jpg", 3);
    } catch (const lln::Error& error) {
      EXPECT_THAT(error.what(), testing::HasSubstr("cut.jpg"));
      ++refused;
    }
  }
  EXPECT_GE(refused, static_cast<int>(good.size()) - 2);  // the end marker alone may be missing
}

TEST(Images, LayoutsThatAreNotThereAreRefused) {
  const auto io = lln::ErrorCode::io;
  const Folder empty;
  lln::test::expect_error([&] { images(empty.path()); },
                          {"set", "a folder or a tar in " + empty.path()});
  std::filesystem::create_directories(empty / "train");
  lln::test::expect_error([&] { images(empty.path()); },
                          {empty.path(), "train/CLASS/*.jpg", "at least 2 classes", "found 0"}, io);
  const Folder one;
  one.write("train/cat/a.jpg", test::plain_jpeg(8, 8, 1, 2, 3));
  lln::test::expect_error([&] { images(one.path()); }, {"one, cat"}, io);
  const Folder other;
  write_folder(other, animals());
  other.write("test/horse/a.jpg", test::plain_jpeg(8, 8, 1, 2, 3));
  lln::test::expect_error([&] { images(other.path()); }, {"test/horse/a.jpg", "horse", "train"},
                          io);
  lln::test::expect_error([&] { images(empty.path(), "set = 'none.tar'"); }, {"none.tar"}, io);
  const Folder tars;
  test::write_tar(tars / "a.tar", animals(), false);
  std::filesystem::resize_file(tars / "a.tar", 3000);
  lln::test::expect_error([&] { images(tars.path(), "set = 'a.tar'"); }, {"a.tar"}, io);
}

TEST(Jpeg, SizesColoursAndReduction) {
  const Picture grey =
      decode_jpeg(test::jpeg_of(3, 5, 1, std::vector<std::uint8_t>(15, 77)), "g", 3);
  EXPECT_EQ(grey.height, 3);
  EXPECT_EQ(grey.width, 5);
  EXPECT_EQ(grey.channels, 3);
  EXPECT_NEAR(grey.bytes[4], 77, 2);
  const std::vector<std::uint8_t> large = test::plain_jpeg(100, 200, 10, 200, 30);
  EXPECT_EQ(decode_jpeg(large, "l", 3).width, 200);
  EXPECT_EQ(decode_jpeg(large, "l", 3, 60).width, 200);
  EXPECT_EQ(decode_jpeg(large, "l", 3, 50).width, 100);
  EXPECT_EQ(decode_jpeg(large, "l", 3, 13).height, 25);
  EXPECT_NEAR(decode_jpeg(large, "l", 1).bytes[0], 0.299 * 10 + 0.587 * 200 + 0.114 * 30, 2);
  // Full cyan and no black, stored upside down.
  std::vector<std::uint8_t> inks;
  for (int i = 0; i < 64; ++i) inks.insert(inks.end(), {0, 255, 255, 255});
  const Picture cyan = decode_jpeg(test::jpeg_of(8, 8, 4, inks), "c", 3);
  EXPECT_NEAR(cyan.bytes[0], 0, 3);
  EXPECT_NEAR(cyan.bytes[1], 255, 3);
  EXPECT_EQ(cyan.bytes.size(), 192u);
}

TEST(Jpeg, APictureThatIsTooLargeIsRefusedBeforeItIsMadeSmaller) {
  std::vector<std::uint8_t> huge = test::plain_jpeg(16, 16, 1, 2, 3);
  for (std::size_t i = 0; i + 8 < huge.size(); ++i) {
    if (huge[i] != 0xFF || huge[i + 1] != 0xC0) continue;  // the frame: height and width
    huge[i + 5] = huge[i + 7] = 0xFF;
    huge[i + 6] = huge[i + 8] = 0;
  }
  lln::test::expect_error([&] { decode_jpeg(huge, "huge.jpg", 3, 13); },
                          {"huge.jpg", "65280 x 65280 pixels"}, lln::ErrorCode::io);
}

TEST(TarFile, ACompressedOneHasALimit) {
  const Folder folder;
  const auto all = [](const std::string&) { return true; };
  test::write_tar(folder / "packed.tar.xz", animals(), true);
  test::write_tar(folder / "plain.tar", animals(), false);
  const TarFile plain(folder / "plain.tar", all, 100);
  std::uint64_t sum = 0;
  for (std::size_t i = 0; i < plain.size(); ++i) sum += plain.read(i).size();
  EXPECT_EQ(TarFile(folder / "packed.tar.xz", all, sum).size(), plain.size());
  lln::test::expect_error([&] { TarFile(folder / "packed.tar.xz", all, sum - 1); },
                          {"packed.tar.xz", std::to_string(sum - 1), "plain tar"},
                          lln::ErrorCode::io);
}

TEST(Augment, CropsFlipsAndColoursAreSpreadAsSet) {
  const Augmentation augmentation{.smallest_crop = 0.4, .brightness = 0.3, .contrast = 0.1};
  double area = 0;
  double brightness = 0;
  double squares = 0;
  double left = 0;
  int flipped = 0;
  constexpr int kViews = 4000;
  for (std::uint64_t i = 0; i < kViews; ++i) {
    const View view = random_view(augmentation, 100, 100, Random(1, 1, i));
    ASSERT_GE(view.top, 0);
    ASSERT_GE(view.left, 0);
    ASSERT_LE(view.top + view.height, 100);
    ASSERT_LE(view.left + view.width, 100);
    const double share = view.height * view.width / 1e4;
    ASSERT_GT(share, 0.38);
    ASSERT_GT(view.width / view.height, 0.74);
    ASSERT_LT(view.width / view.height, 1.36);
    area += share / kViews;
    flipped += view.flipped;
    brightness += view.brightness / kViews;
    squares += (view.brightness - 1) * (view.brightness - 1) / kViews;
    left += (view.left + view.width / 2) / kViews;
    ASSERT_LE(std::abs(view.contrast - 1), 0.1);
  }
  EXPECT_NEAR(flipped / double{kViews}, 0.5, 0.04);
  EXPECT_NEAR(brightness, 1, 0.01);
  EXPECT_NEAR(squares, 0.3 * 0.3 / 3, 0.002);
  EXPECT_NEAR(left, 50, 0.5);
  EXPECT_NEAR(area, 0.65,
              0.05);  // large crops of a far aspect ratio do not fit and are drawn again
}

TEST(Augment, SettingsActAlone) {
  Augmentation augmentation;
  const View all = random_view(augmentation, 40, 60, Random(1, 1, 5));
  augmentation.flip = false;
  const View unflipped = random_view(augmentation, 40, 60, Random(1, 1, 5));
  EXPECT_FALSE(unflipped.flipped);
  EXPECT_EQ(unflipped.brightness, all.brightness);
  EXPECT_EQ(unflipped.left, all.left);
  augmentation.smallest_crop = 1;
  const View whole = random_view(augmentation, 40, 60, Random(1, 1, 5));
  EXPECT_EQ(whole.height, 40);
  EXPECT_EQ(whole.width, 40);
  EXPECT_EQ(whole.left, 10);
  EXPECT_EQ(whole.brightness, all.brightness);
  augmentation.enabled = false;
  EXPECT_EQ(random_view(augmentation, 40, 60, Random(1, 1, 5)).brightness, 1);
}

// Against sums written out: a picture that is a plane stays one under the triangle filter.
TEST(Augment, ResamplingKeepsGradientsAndFlips) {
  Picture picture{1, 32, 64, {}};
  for (int row = 0; row < 32; ++row) {
    for (int column = 0; column < 64; ++column) {
      picture.bytes.push_back(static_cast<std::uint8_t>(3 * column + row));
    }
  }
  const Normalisation bytes{0, 1 / 255.0};
  for (const std::int64_t size : {8, 16, 48}) {
    std::vector<float> pixels(static_cast<std::size_t>(size * size));
    View view{.top = 8, .left = 16, .height = 16, .width = 32};
    draw_view(picture, view, size, bytes, pixels);
    for (std::int64_t row = 0; row < size; ++row) {
      for (std::int64_t column = 0; column < size; ++column) {
        const double y = 8 + (row + 0.5) * 16 / static_cast<double>(size) - 0.5;
        const double x = 16 + (column + 0.5) * 32 / static_cast<double>(size) - 0.5;
        EXPECT_NEAR(pixels[static_cast<std::size_t>(row * size + column)], 3 * x + y, 0.02);
      }
    }
    std::vector<float> flipped(pixels.size());
    view.flipped = true;
    draw_view(picture, view, size, bytes, flipped);
    EXPECT_EQ(flipped[0], pixels[static_cast<std::size_t>(size - 1)]);
    EXPECT_EQ(flipped[static_cast<std::size_t>(size - 1)], pixels[0]);
  }
}

TEST(Augment, ColoursChangeByTheirFormulas) {
  const Picture picture{3, 1, 1, {100, 50, 200}};
  const Normalisation bytes{0, 1 / 255.0};
  std::vector<float> pixels(3);
  View view{.height = 1, .width = 1};
  view.brightness = 1.2;
  draw_view(picture, view, 1, bytes, pixels);
  EXPECT_NEAR(pixels[0], 120, 1e-3);
  EXPECT_NEAR(pixels[2], 240, 1e-3);
  view.brightness = 1;
  view.saturation = 0;
  draw_view(picture, view, 1, bytes, pixels);
  for (const float x : pixels) EXPECT_NEAR(x, 29.9 + 29.35 + 22.8, 1e-3);
  view.saturation = 1;
  view.contrast = 0.5;
  draw_view(picture, view, 1, bytes, pixels);
  EXPECT_NEAR(pixels[1], (82.05 + 50) / 2, 1e-2);
}

TEST(PictureCache, KeepsTheLastUsedWithinItsBytes) {
  PictureCache cache(250);
  int decoded = 0;
  const auto get = [&](std::uint64_t key) {
    return cache.get(key, [&] {
      ++decoded;
      return Picture{1, 10, 10, std::vector<std::uint8_t>(100, static_cast<std::uint8_t>(key))};
    });
  };
  get(1);
  get(2);
  get(1);
  EXPECT_EQ(decoded, 2);
  get(3);  // 2 leaves
  EXPECT_EQ(cache.bytes(), 200u);
  get(1);
  EXPECT_EQ(decoded, 3);
  EXPECT_EQ(get(2)->bytes[0], 2);
  EXPECT_EQ(decoded, 4);
}

}  // namespace
}  // namespace lln_torch
