// Compares generated Pathfinder pictures with a set on disk, for those who have the Long Range
// Arena's: pathfinder_compare FILE [PICTURES], the file being records of a label byte and 1,024
// grey bytes, plain or compressed.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <cstdlib>
#include <exception>

#include "lln_torch/data/packed_file.h"
#include "lln_torch/data/pathfinder.h"
#include "picture_statistics.h"

namespace {

using lln_torch::test::PictureStatistics;

void print_line(const char* what, double file, double made) {
  fmt::print("{:<42} {:>10.3f} {:>10.3f}\n", what, file, made);
}

void compare(const std::string& path, std::uint64_t pictures) {
  PictureStatistics file;
  const std::vector<std::uint8_t> bytes = lln_torch::read_packed_file(path, 1ULL << 32);
  constexpr std::size_t kRecord = 1 + lln_torch::kPathfinderPixels;
  for (std::size_t i = 0; i + kRecord <= bytes.size(); i += kRecord) {
    file.add(bytes[i], std::span(bytes).subspan(i + 1, kRecord - 1));
  }
  PictureStatistics made;
  for (std::uint64_t i = 0; i < pictures; ++i) {
    const auto picture = lln_torch::make_pathfinder(
        lln_torch::Random(0, lln_torch::Stream("pathfinder compare"), i), {});
    made.add(static_cast<std::uint8_t>(picture.label), picture.pixels);
  }
  fmt::print("{:<42} {:>10} {:>10}\n", "", "file", "generated");
  print_line("pictures", file.count(), made.count());
  print_line("share of positive ones", file.positive(), made.positive());
  print_line("mean of pixels", file.mean(), made.mean());
  print_line("standard deviation of pixels", file.deviation(), made.deviation());
  print_line("standard deviation of pictures' means", file.deviation_of_means(),
             made.deviation_of_means());
  print_line("lit pixels (over 20) a picture", file.lit(), made.lit());
  print_line("bright pixels (over 128) a picture", file.bright(), made.bright());
  print_line("connected pieces a picture", file.pieces(), made.pieces());
  double apart = 0;
  for (std::size_t v = 0; v < 256; ++v) {
    apart += std::abs(file.value_share(v) - made.value_share(v)) / 2;
  }
  fmt::print("histograms of values differ by {:.1f}% of the pixels\n", 100 * apart);
  for (std::size_t i = 0; i < PictureStatistics::kRings; ++i) {
    print_line(fmt::format("mean {} to {} pixels from the centre", 2 * i, 2 * i + 2).c_str(),
               file.ring(i), made.ring(i));
  }
  for (std::size_t i = 0; i < lln_torch::test::kSide; ++i) {
    print_line(fmt::format("mean of row {}", i).c_str(), file.row(i), made.row(i));
  }
  for (std::size_t i = 0; i < lln_torch::test::kSide; ++i) {
    print_line(fmt::format("mean of column {}", i).c_str(), file.column(i), made.column(i));
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2 || argc > 3) {
    fmt::print(stderr, "pathfinder_compare FILE [PICTURES]\n");
    return 2;
  }
  try {
    compare(argv[1], argc == 3 ? std::strtoull(argv[2], nullptr, 10) : 10000);
  } catch (const std::exception& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 3;
  }
  return 0;
}
