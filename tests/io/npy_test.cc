// The .npy reader and writer: what is written comes back, every kind of damage is refused with its
// own text, and random damage is refused or read in full without believing a length.
// SPDX-License-Identifier: Apache-2.0
#include "io/npy.h"

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "damage.h"
#include "lln/error.h"
#include "scratch_folder.h"
#include "watched_allocation.h"

namespace lln::io {
namespace {

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

// A file with this header, whether true or not, and so many bytes of data.
std::string raw_npy(std::string_view header, std::size_t data_bytes, char major = 1) {
  std::string bytes = std::string("\x93NUMPY") + major + '\0';
  const auto length = static_cast<std::uint32_t>(header.size());
  bytes.append(reinterpret_cast<const char*>(&length), major == 1 ? 2 : 4);
  bytes += header;
  bytes.append(data_bytes, '\1');
  return bytes;
}

std::string header(std::string_view descr, std::string_view order, std::string_view shape) {
  return "{'descr': " + std::string(descr) + ", 'fortran_order': " + std::string(order) +
         ", 'shape': " + std::string(shape) + ", }\n";
}

TEST(Npy, RoundTrip) {
  const ScratchFolder folder;
  const std::vector<float> f32 = {1, 2, 3, 4, 5, 6};
  const std::vector<double> f64 = {0.5};
  const std::vector<std::uint16_t> f16 = {0x3c00, 0x4000, 0x4200};
  const struct {
    std::string dtype;
    std::vector<std::int64_t> shape;
    std::span<const std::byte> data;
  } tensors[] = {{"F32", {1, 2, 1, 3}, bytes_of(f32)},
                 {"F64", {}, bytes_of(f64)},
                 {"F16", {3}, bytes_of(f16)},
                 {"F32", {4, 0, 2}, {}},
                 {"F32", std::vector<std::int64_t>(32, 1), bytes_of(f32).first(4)}};
  for (const auto& t : tensors) {
    const std::string path = folder.file("t.npy");
    write_npy(path, t.dtype, t.shape, t.data);
    const NpyReader reader(path);
    EXPECT_EQ(reader.dtype(), t.dtype);
    EXPECT_EQ(reader.shape(), t.shape);
    const Bytes data = reader.read();
    ASSERT_EQ(data.size(), t.data.size());
    EXPECT_TRUE(std::equal(t.data.begin(), t.data.end(), data.data()));
    EXPECT_EQ((read_bytes(path).size() - t.data.size()) % 64, 0U);
    EXPECT_EQ(folder.entries(), 1U);
  }
}

TEST(Npy, WrittenAsNumpyWritesIt) {
  const ScratchFolder folder;
  const std::vector<float> values = {1, 2};
  write_npy(folder.file("t.npy"), "F32", std::vector<std::int64_t>{2}, bytes_of(values));
  // numpy.save of numpy.array([1, 2], numpy.float32).
  std::string expected = "\x93NUMPY";
  expected += std::string("\x01\x00\x76\x00", 4);
  expected += "{'descr': '<f4', 'fortran_order': False, 'shape': (2,), }";
  expected.resize(127, ' ');
  expected += '\n';
  expected.append(reinterpret_cast<const char*>(values.data()), 8);
  EXPECT_EQ(read_bytes(folder.file("t.npy")), expected);
}

TEST(Npy, TakesWhatOtherWritersWrite) {
  const ScratchFolder folder;
  const std::string path = folder.file("t.npy");
  for (const std::string& bytes :
       {raw_npy(header("'<f4'", "False", "(3, 2)"), 24, 2),
        raw_npy(header("'<f4'", "False", "(3, 2)"), 24, 3),
        raw_npy(R"({"shape":(3,2),"fortran_order":False,"descr":"<f4"})", 24),
        raw_npy(header("'<f4'", "False", "( 3,2 , )") + "    \n", 24)}) {
    write_bytes(path, bytes);
    const NpyReader reader(path);
    EXPECT_EQ(reader.dtype(), "F32");
    EXPECT_EQ(reader.shape(), (std::vector<std::int64_t>{3, 2}));
    EXPECT_EQ(reader.read().size(), 24U);
  }
  write_bytes(path, raw_npy(header("'<f4'", "True", "(3,)"), 12));  // one dimension has no order
  EXPECT_EQ(NpyReader(path).shape(), std::vector<std::int64_t>{3});
}

struct Damage {
  const char* name;
  std::string bytes;
  std::string text;  // of the error, after "PATH: "
};

std::vector<Damage> damages() {
  const std::string good = header("'<f4'", "False", "(2, 3)");
  std::string wrong_version = raw_npy(good, 24);
  wrong_version[6] = 4;
  std::string long_header = raw_npy(good, 24);
  long_header[9] = 0x7f;
  const std::string huge(std::size_t{70000}, ' ');
  return {
      {"Empty", "", "has 0 bytes, a .npy file has at least 10"},
      {"Foreign", std::string(100, 'x'),
       "does not begin with the magic of NumPy: this is not a .npy file"},
      {"Version", wrong_version, "has version 4.0, expected 1.0, 2.0 or 3.0"},
      {"ShortVersion2", raw_npy("", 0, 2).substr(0, 11),
       "has 11 bytes, one of this version at least 12"},
      {"HeaderBeyondFile", long_header,
       "claims a header of 32572 bytes, but has 84 after the length"},
      {"HugeHeader", raw_npy(huge, 0, 2),
       "claims a header of 70000 bytes, more than the limit of 65536"},
      {"NoHeader", raw_npy("", 0), "the header, byte 0: expected '{'"},
      {"Unclosed", raw_npy("{'descr': '<f4'", 0), "the header, byte 15: expected ','"},
      {"UnclosedText", raw_npy("{'descr: ", 0),
       "the header, byte 2: a text without its closing quote"},
      {"Escape", raw_npy("{'de\\'scr': 1}", 0), "the header, byte 2: an escape in a text"},
      {"Behind", raw_npy(good + "x", 24), "the header, byte 60: text follows the dictionary"},
      {"UnknownKey", raw_npy("{'colour': 'red'}", 0),
       "the header, byte 10: the key 'colour' is not known"},
      {"KeyTwice", raw_npy("{'descr': '<f4', 'descr': '<f4'}", 0),
       "the header, byte 25: the key descr occurs twice"},
      {"NoDescr", raw_npy("{'fortran_order': False, 'shape': ()}", 4), "the header has no descr"},
      {"NoOrder", raw_npy("{'descr': '<f4', 'shape': ()}", 4), "the header has no fortran_order"},
      {"NoShape", raw_npy("{'descr': '<f4', 'fortran_order': False}", 4),
       "the header has no shape"},
      {"OrderNotBoolean", raw_npy(header("'<f4'", "0", "()"), 4),
       "the header, byte 34: expected True or False"},
      {"Structured", raw_npy(header("[('a', '<f4')]", "False", "()"), 4),
       "the header, byte 10: expected a text in quotes"},
      {"BigEndian", raw_npy(header("'>f4'", "False", "(2, 3)"), 24),
       "the dtype '>f4' is not taken: expected <f2, <f4 or <f8"},
      {"Integer", raw_npy(header("'<i4'", "False", "(2, 3)"), 24),
       "the dtype '<i4' is not taken: expected <f2, <f4 or <f8"},
      {"Bf16", raw_npy(header("'<V2'", "False", "(2, 3)"), 12),
       "the dtype '<V2' is not taken: expected <f2, <f4 or <f8; .npy has no bf16, a safetensors "
       "file does"},
      {"Fortran", raw_npy(header("'<f4'", "True", "(2, 3)"), 24),
       "is in Fortran order, expected C order: numpy.ascontiguousarray makes it so"},
      {"ShapeNotTuple", raw_npy(header("'<f4'", "False", "[2, 3]"), 24),
       "the header, byte 50: expected '('"},
      {"NegativeDimension", raw_npy(header("'<f4'", "False", "(-2, 3)"), 24),
       "the header, byte 51: expected an integer from 0 to 2^63-1"},
      {"HugeDimension", raw_npy(header("'<f4'", "False", "(9223372036854775808,)"), 24),
       "the header, byte 51: expected an integer from 0 to 2^63-1"},
      {"ProductOverflow", raw_npy(header("'<f4'", "False", "(4294967296, 4294967296)"), 0),
       "<f4 of shape [4294967296, 4294967296] has more than 2^64-1 bytes"},
      {"TooShort", raw_npy(good, 20), "<f4 of shape [2, 3] has 24 bytes, the file has 20 for it"},
      {"TooLong", raw_npy(good, 25), "<f4 of shape [2, 3] has 24 bytes, the file has 25 for it"},
  };
}

class NpyDamage : public testing::TestWithParam<Damage> {};

TEST_P(NpyDamage, IsRefusedByName) {
  const ScratchFolder folder;
  const std::string path = folder.file("damaged.npy");
  write_bytes(path, GetParam().bytes);
  try {
    const NpyReader reader(path);
    FAIL() << "accepted; expected: " << GetParam().text;
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::io);
    EXPECT_EQ(std::string(e.what()), path + ": " + GetParam().text);
  }
}

INSTANTIATE_TEST_SUITE_P(All, NpyDamage, testing::ValuesIn(damages()),
                         [](const auto& damage) { return std::string(damage.param.name); });

TEST(Npy, FileThatShrinksAfterOpeningIsAnError) {
  const ScratchFolder folder;
  const std::string path = folder.file("f");
  write_bytes(path, raw_npy(header("'<f4'", "False", "(2,)"), 8));
  const NpyReader reader(path);
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 3);
  EXPECT_THROW(reader.read(), Error);
}

TEST(NpyWriter, RefusesWhatItCouldNotRead) {
  const ScratchFolder folder;
  const std::vector<float> values = {1, 2};
  const auto refuses = [&](const std::string& dtype, std::vector<std::int64_t> shape) {
    EXPECT_THROW(write_npy(folder.file("t"), dtype, shape, bytes_of(values)), Error);
    EXPECT_EQ(folder.entries(), 0U);
  };
  refuses("F32", {3});
  refuses("F32", {-2});
  refuses("I64", {1});
  refuses("BF16", {4});
  refuses("F64", std::vector<std::int64_t>(33, 1));
  EXPECT_EQ(npy_obstacle("BF16"), ".npy has no bf16: write a safetensors file");
  EXPECT_EQ(npy_obstacle("F16"), "");
}

TEST(NpyWriter, InterruptionLeavesTheOldFileAndNothingElse) {
  const ScratchFolder folder;
  write_bytes(folder.file("out"), "before");
  const std::vector<float> values = {1, 2};
  EXPECT_THROW(write_npy(folder.file("out"), "F32", std::vector<std::int64_t>{2}, bytes_of(values),
                         [] { return true; }),
               Error);
  EXPECT_EQ(read_bytes(folder.file("out")), "before");
  EXPECT_EQ(folder.entries(), 1U);
}

// Structure, numbers at limits, fragments of the format.
const std::vector<std::string> kPieces = {"{",
                                          "}",
                                          "(",
                                          ")",
                                          ",",
                                          ":",
                                          "'",
                                          "-",
                                          "\"",
                                          "9",
                                          "18446744073709551615",
                                          "True",
                                          "'shape': (",
                                          "<f8",
                                          std::string("\0", 1),
                                          "\xff",
                                          "\\"};

TEST(NpyFuzz, DamagedFilesAreRefusedOrReadInFull) {
  const ScratchFolder folder;
  const std::string path = folder.file("damaged");
  std::mt19937 random(20240502);
  int accepted = 0, refused = 0;
  constexpr int kFiles = 2000;
  for (int i = 0; i < kFiles; ++i) {
    const char major = static_cast<char>(1 + i % 3);
    const std::string bytes =
        damaged(raw_npy(header("'<f4'", "False", "(1, 2, 3)"), 24, major), kPieces, random);
    write_bytes(path, bytes);
    test::largest_allocation_reset();
    try {
      const NpyReader reader(path);
      ASSERT_EQ(reader.read().size(), reader.bytes());
      ++accepted;
    } catch (const Error& e) {
      EXPECT_EQ(std::string(e.what()).rfind(path + ": ", 0), 0U) << e.what();
      ++refused;
    }
    ASSERT_LE(test::largest_allocation(), 4 * bytes.size() + 4096) << "file " << i;
  }
  // The mutations must reach both sides of the reader to mean anything.
  EXPECT_GT(accepted, kFiles / 100);
  EXPECT_GT(refused, kFiles / 2);
}

}  // namespace
}  // namespace lln::io
