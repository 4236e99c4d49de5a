// The safetensors reader and writer: what is written comes back, every kind of damage is refused
// with its own text, and a writer that fails or is interrupted leaves nothing behind.
// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstring>
#include <numeric>

#include "io/output_file.h"
#include "lln/error.h"
#include "scratch_folder.h"

namespace lln::io {
namespace {

template <class T>
std::span<const std::byte> bytes_of(const std::vector<T>& values) {
  return std::as_bytes(std::span(values));
}

TEST(Safetensors, RoundTripKeepsTensorsAndMetadata) {
  const ScratchFolder folder;
  const std::string path = folder.file("round.safetensors");
  const std::vector<float> f32 = {1, 2, 3, 4, 5, 6};
  const std::vector<double> f64 = {0.5, -0.5};
  const std::vector<std::uint16_t> half = {0x3c00, 0x4000, 0x4200};
  const std::vector<std::int32_t> i32 = {-1};
  const std::vector<std::int64_t> i64 = {std::int64_t{1} << 40, 7};
  const std::vector<std::uint8_t> bytes = {1, 0, 1};
  const std::vector<TensorToWrite> tensors = {
      {"mask", "BOOL", {3}, bytes_of(bytes)}, {"x", "F32", {2, 3}, bytes_of(f32)},
      {"h", "F16", {3, 1}, bytes_of(half)},   {"w", "BF16", {3}, bytes_of(half)},
      {"i", "I32", {}, bytes_of(i32)},        {"l", "I64", {2}, bytes_of(i64)},
      {"u", "U8", {1, 3}, bytes_of(bytes)},   {"d", "F64", {2}, bytes_of(f64)},
      {"empty", "F32", {4, 0, 2}, {}},
  };
  const Metadata metadata = {{"problem", "forward:f32"}, {"quote", "a \"b\" \n"}};
  write_safetensors(path, tensors, metadata);

  const SafetensorsReader reader(path);
  EXPECT_EQ(reader.metadata(), metadata);
  ASSERT_EQ(reader.tensors().size(), tensors.size());
  for (const TensorToWrite& t : tensors) {
    const TensorInfo* info = reader.find(t.name);
    ASSERT_NE(info, nullptr) << t.name;
    EXPECT_EQ(info->dtype, t.dtype);
    EXPECT_EQ(info->shape, t.shape);
    EXPECT_EQ(info->begin % element_bytes(t.dtype), 0U) << t.name;
    const Bytes data = reader.read(*info);
    ASSERT_EQ(data.size(), t.data.size()) << t.name;
    EXPECT_NE(data.data(), nullptr);
    EXPECT_TRUE(std::equal(t.data.begin(), t.data.end(), data.data())) << t.name;
  }
  EXPECT_EQ(reader.find("X"), nullptr);

  const std::string raw = read_bytes(path);
  std::uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, raw.data(), sizeof(header_bytes));
  EXPECT_EQ(header_bytes % 8, 0U);
  EXPECT_EQ(folder.entries(), 1U);
}

TEST(Safetensors, FileWithoutTensorsIsLegal) {
  const ScratchFolder folder;
  write_safetensors(folder.file("none"), {});
  const SafetensorsReader reader(folder.file("none"));
  EXPECT_TRUE(reader.tensors().empty());
  EXPECT_TRUE(reader.metadata().empty());
}

TEST(Safetensors, UnknownDtypeIsListedAndRefusedWhenRead) {
  const ScratchFolder folder;
  const std::string path = folder.file("f");
  write_bytes(path, raw_file(R"({"a":{"dtype":"F4","shape":[6],"data_offsets":[0,3]},)"
                             R"("b":{"dtype":"U8","shape":[2],"data_offsets":[3,5]}})",
                             5));
  const SafetensorsReader reader(path);
  ASSERT_EQ(reader.tensors().size(), 2U);
  EXPECT_EQ(reader.find("a")->dtype, "F4");
  EXPECT_EQ(reader.read(*reader.find("b")).size(), 2U);
  try {
    reader.read(*reader.find("a"));
    FAIL() << "read a tensor of unknown dtype";
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::io);
    EXPECT_EQ(e.what(), path + ": tensor 'a': the dtype 'F4' is not known");
  }
}

TEST(Safetensors, FileThatShrinksAfterOpeningIsAnError) {
  const ScratchFolder folder;
  const std::string path = folder.file("f");
  write_bytes(path, raw_file(R"({"a":{"dtype":"U8","shape":[9],"data_offsets":[0,9]}})", 9));
  const SafetensorsReader reader(path);
  std::filesystem::resize_file(path, std::filesystem::file_size(path) - 4);
  try {
    reader.read(reader.tensors()[0]);
    FAIL() << "read beyond the end of the file";
  } catch (const Error& e) {
    EXPECT_EQ(e.what(), path + ": tensor 'a': the file ended 4 bytes too early while it was read");
  }
}

struct Damage {
  const char* name;
  std::string bytes;
  std::string text;  // of the error, after "PATH: "
};

std::string entry(std::string_view dtype, std::string_view shape, std::string_view offsets) {
  return "{\"a\":{\"dtype\":" + std::string(dtype) + ",\"shape\":" + std::string(shape) +
         ",\"data_offsets\":" + std::string(offsets) + "}}";
}

std::vector<Damage> damages() {
  const auto length = [](std::uint64_t n) {
    return std::string(reinterpret_cast<const char*>(&n), sizeof(n));
  };
  const std::string two = R"("dtype":"U8","shape":[4],"data_offsets":)";
  return {
      {"Empty", "", "has 0 bytes, a safetensors file has at least 8"},
      {"Short", "1234567", "has 7 bytes, a safetensors file has at least 8"},
      {"HeaderBeyondFile", length(99) + "{}",
       "claims a header of 99 bytes, but has 2 after the length"},
      {"HugeHeader", length(~std::uint64_t{0}) + "{}",
       "claims a header of 18446744073709551615 bytes, but has 2 after the length"},
      {"NoHeader", length(0),
       "the header of 0 bytes does not begin with '{': this is not a safetensors file"},
      {"NotAnObject", raw_file("[1,2]", 0),
       "the header of 5 bytes does not begin with '{': this is not a safetensors file"},
      {"BadJson", raw_file("{\"a\":", 0), "the header is not valid JSON at byte 6 of it"},
      {"TextAfterJson", raw_file("{} x", 0), "the header is not valid JSON at byte 4 of it"},
      {"NotUtf8", raw_file("{\"\xff\":1}", 0), "the header is not valid JSON at byte 3 of it"},
      {"DeepArray", raw_file("{\"a\":" + std::string(100000, '['), 0),
       "tensor 'a': the entry is an array, expected an object"},
      {"DeepObject", raw_file(R"({"a":{"shape":{"b":{"c":1}}}})", 0),
       "tensor 'a': shape is an object, expected an array of integers"},
      {"EntryNotObject", raw_file(R"({"a":3})", 0),
       "tensor 'a': the entry is 3, expected an object"},
      {"EntryNull", raw_file(R"({"a":null})", 0),
       "tensor 'a': the entry is null, expected an object"},
      {"UnknownField", raw_file(R"({"a":{"colour":"red"}})", 0),
       "tensor 'a': the field 'colour' is not known"},
      {"FieldTwice", raw_file(R"({"a":{"dtype":"U8","dtype":"U8"}})", 0),
       "tensor 'a': the field dtype occurs twice"},
      {"MissingField", raw_file(R"({"a":{"dtype":"U8","shape":[0]}})", 0),
       "tensor 'a': the field data_offsets is missing"},
      {"DtypeNotString", raw_file(entry("1", "[4]", "[0,4]"), 4),
       "tensor 'a': dtype is 1, expected a string"},
      {"ShapeNotArray", raw_file(entry(R"("U8")", "4", "[0,4]"), 4),
       "tensor 'a': shape is 4, expected an array of integers"},
      {"NegativeDimension", raw_file(entry(R"("U8")", "[-4]", "[0,4]"), 4),
       "tensor 'a': shape has the negative number -4"},
      {"HugeDimension", raw_file(entry(R"("U8")", "[9223372036854775808]", "[0,4]"), 4),
       "tensor 'a': shape has 9223372036854775808, expected integers from 0 to 2^63-1"},
      {"FractionalDimension", raw_file(entry(R"("U8")", "[4.5]", "[0,4]"), 4),
       "tensor 'a': shape has the number 4.5, expected integers from 0 to 2^63-1"},
      {"ProductOverflow", raw_file(entry(R"("F32")", "[4294967296, 4294967296]", "[0,0]"), 0),
       "tensor 'a': F32 of shape [4294967296, 4294967296] has more than 2^64-1 bytes"},
      {"SizeMismatch", raw_file(entry(R"("F32")", "[2, 3]", "[0,20]"), 20),
       "tensor 'a': F32 of shape [2, 3] has 24 bytes, but data_offsets [0, 20] hold 20"},
      {"OneOffset", raw_file(entry(R"("U8")", "[4]", "[4]"), 4),
       "tensor 'a': data_offsets has 1 numbers, expected 2"},
      {"ThreeOffsets", raw_file(entry(R"("U8")", "[4]", "[0,4,8]"), 4),
       "tensor 'a': data_offsets has more than 2 numbers"},
      {"OffsetsBackwards", raw_file(entry(R"("U8")", "[4]", "[4,0]"), 4),
       "tensor 'a': data_offsets [4, 0] run backwards"},
      {"OffsetsBeyondFile", raw_file(entry(R"("U8")", "[8]", "[0,8]"), 4),
       "tensor 'a': data_offsets [0, 8] reach beyond the 4 bytes of data in the file"},
      {"Overlap", raw_file("{\"a\":{" + two + "[0,4]},\"b\":{" + two + "[2,6]}}", 6),
       "tensor 'b': data_offsets [2, 6] overlap [0, 4] of tensor 'a'"},
      {"Hole", raw_file("{\"a\":{" + two + "[0,4]},\"b\":{" + two + "[6,10]}}", 10),
       "tensor 'b': data_offsets [6, 10] leave bytes 4 to 6 of the data unused"},
      {"BytesLeft", raw_file(entry(R"("U8")", "[4]", "[0,4]"), 9),
       "the tensors have 4 bytes, the file has 9 for them"},
      {"NameTwice", raw_file("{\"a\":{" + two + "[0,4]},\"a\":{" + two + "[4,8]}}", 8),
       "tensor 'a' occurs twice"},
      {"MetadataNotStrings", raw_file(R"({"__metadata__":{"n":1}})", 0),
       "tensor '__metadata__': the field 'n' is 1, expected a string"},
      {"MetadataTwice", raw_file(R"({"__metadata__":{},"__metadata__":{}})", 0),
       "__metadata__ occurs twice"},
      {"ControlCharacterInName", raw_file("{\"a\\u001b[2J\":1}", 0),
       "tensor 'a\\x1b[2J': the entry is 1, expected an object"},
  };
}

class SafetensorsDamage : public testing::TestWithParam<Damage> {};

TEST_P(SafetensorsDamage, IsRefusedByName) {
  const ScratchFolder folder;
  const std::string path = folder.file("damaged.safetensors");
  write_bytes(path, GetParam().bytes);
  try {
    const SafetensorsReader reader(path);
    FAIL() << "accepted; expected: " << GetParam().text;
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), ErrorCode::io);
    EXPECT_EQ(std::string(e.what()), path + ": " + GetParam().text);
  }
}

INSTANTIATE_TEST_SUITE_P(All, SafetensorsDamage, testing::ValuesIn(damages()),
                         [](const auto& damage) { return std::string(damage.param.name); });

TEST(Safetensors, EveryTruncationIsRefused) {
  const ScratchFolder folder;
  const std::vector<float> values = {1, 2, 3, 4};
  const std::vector<TensorToWrite> tensors = {{"x", "F32", {4}, bytes_of(values)}};
  write_safetensors(folder.file("whole"), tensors, {{"k", "v"}});
  const std::string whole = read_bytes(folder.file("whole"));
  for (std::size_t size = 0; size < whole.size(); ++size) {
    write_bytes(folder.file("cut"), whole.substr(0, size));
    EXPECT_THROW(SafetensorsReader(folder.file("cut")), Error) << size << " of " << whole.size();
  }
}

TEST(Safetensors, OpenRefusesWhatIsNoFile) {
  const ScratchFolder folder;
  EXPECT_THROW(SafetensorsReader(folder.file("missing")), Error);
  EXPECT_THROW(SafetensorsReader(folder.path().string()), Error);
  ASSERT_EQ(::mkfifo(folder.file("pipe").c_str(), 0600), 0);
  EXPECT_THROW(SafetensorsReader(folder.file("pipe")), Error);
}

TEST(SafetensorsWriter, RefusesWhatItCouldNotRead) {
  const ScratchFolder folder;
  const std::string path = folder.file("out");
  const std::vector<float> values = {1, 2};
  const auto refuses = [&](std::vector<TensorToWrite> tensors) {
    EXPECT_THROW(write_safetensors(path, tensors), Error);
    EXPECT_EQ(folder.entries(), 0U);
  };
  refuses({{"__metadata__", "F32", {2}, bytes_of(values)}});
  refuses({{"x", "F32", {2}, bytes_of(values)}, {"x", "F32", {2}, bytes_of(values)}});
  refuses({{"x", "F32", {3}, bytes_of(values)}});
  refuses({{"x", "F31", {2}, bytes_of(values)}});
  refuses({{"x", "F32", {-2}, bytes_of(values)}});
  refuses({{"\xff", "F32", {2}, bytes_of(values)}});
}

TEST(SafetensorsWriter, InterruptionLeavesTheOldFileAndNothingElse) {
  const ScratchFolder folder;
  const std::string path = folder.file("out");
  write_bytes(path, "before");
  const std::vector<std::uint8_t> large(std::size_t{20} << 20);
  const std::vector<TensorToWrite> tensors = {{"x", "U8", {20 << 20}, bytes_of(large)}};
  for (int last_calm = 0; last_calm < 8; ++last_calm) {
    int asked = 0;
    EXPECT_THROW(write_safetensors(path, tensors, {}, [&] { return asked++ >= last_calm; }), Error);
    EXPECT_EQ(asked, last_calm + 1);
    EXPECT_EQ(read_bytes(path), "before");
    EXPECT_EQ(folder.entries(), 1U);
  }
  write_safetensors(path, tensors, {}, [] { return false; });
  EXPECT_EQ(SafetensorsReader(path).tensors().size(), 1U);
  EXPECT_EQ(folder.entries(), 1U);
}

TEST(SafetensorsWriter, NamesTheObstacleBeforehand) {
  const ScratchFolder folder;
  EXPECT_EQ(write_obstacle(folder.file("new")), "");
  const std::string inside = folder.file("no/such");
  EXPECT_EQ(write_obstacle(inside), inside + ": there is no folder " + folder.file("no"));
  EXPECT_EQ(write_obstacle("/dev/null"), "/dev/null: exists and is not a regular file");
  EXPECT_THROW(write_safetensors("/dev/null", {}), Error);
}

}  // namespace
}  // namespace lln::io
