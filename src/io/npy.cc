// Reading and writing of .npy files. The header is taken apart by a parser of just the dictionaries
// that NumPy writes: three keys, each once; anything else is refused where it stands.
// SPDX-License-Identifier: Apache-2.0
#include "io/npy.h"

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <cstring>
#include <optional>
#include <string_view>

#include "io/output_file.h"
#include "io/safetensors_header.h"
#include "lln/error.h"

namespace lln::io {
namespace {

constexpr std::string_view kMagic = "\x93NUMPY";
constexpr std::uint64_t kVersionEnd = 8;                          // magic, major, minor
constexpr std::uint64_t kMaxNpyHeader = std::uint64_t{64} << 10;  // 100 times a header of rank 32
constexpr std::size_t kMaxRank = 32;
constexpr std::size_t kDataAlignment = 64;

struct Name {
  std::string_view descr, dtype;
};
constexpr std::array<Name, 3> kNames = {{{"<f2", "F16"}, {"<f4", "F32"}, {"<f8", "F64"}}};

struct Dictionary {
  std::optional<std::string> descr;
  std::optional<bool> fortran_order;
  std::optional<std::vector<std::int64_t>> shape;
};

class DictionaryParser {
 public:
  DictionaryParser(const std::string& path, std::string_view text) : path_(path), text_(text) {}

  Dictionary parse() {
    expect('{');
    while (!take('}')) {
      const std::string key = string();
      expect(':');
      if (key == "descr") {
        set(dictionary_.descr, key, [&] { return string(); });
      } else if (key == "fortran_order") {
        set(dictionary_.fortran_order, key, [&] { return boolean(); });
      } else if (key == "shape") {
        set(dictionary_.shape, key, [&] { return tuple(); });
      } else {
        fail(fmt::format("the key {} is not known", printable(key)));
      }
      if (take('}')) break;
      expect(',');
    }
    skip_space();
    if (at_ != text_.size()) fail("text follows the dictionary");
    return dictionary_;
  }

 private:
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(ErrorCode::io, fmt::format("{}: the header, byte {}: {}", path_, at_, what));
  }

  template <class T, class Parse>
  void set(std::optional<T>& field, const std::string& key, const Parse& parse) {
    if (field) fail(fmt::format("the key {} occurs twice", key));
    field = parse();
  }

  void skip_space() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\n')) ++at_;
  }
  bool take(char c) {
    skip_space();
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }
  void expect(char c) {
    if (!take(c)) fail(fmt::format("expected '{}'", c));
  }

  std::string string() {
    const char quote = take('"') ? '"' : '\'';
    if (quote == '\'') {
      if (!take('\'')) fail("expected a text in quotes");
    }
    const std::size_t end = text_.find(quote, at_);
    if (end == std::string_view::npos) fail("a text without its closing quote");
    const std::string_view value = text_.substr(at_, end - at_);
    if (value.find('\\') != std::string_view::npos) fail("an escape in a text");
    at_ = end + 1;
    return std::string(value);
  }

  bool boolean() {
    skip_space();
    for (const bool value : {false, true}) {
      const std::string_view word = value ? "True" : "False";
      if (text_.substr(at_).starts_with(word)) {
        at_ += word.size();
        return value;
      }
    }
    fail("expected True or False");
  }

  std::vector<std::int64_t> tuple() {
    std::vector<std::int64_t> sizes;
    expect('(');
    while (!take(')')) {
      skip_space();
      std::int64_t size = 0;
      const char* const end = text_.data() + text_.size();
      const auto [stop, code] = std::from_chars(text_.data() + at_, end, size);
      if (code != std::errc() || size < 0) fail("expected an integer from 0 to 2^63-1");
      at_ = static_cast<std::size_t>(stop - text_.data());
      if (sizes.size() == kMaxRank) fail(fmt::format("more than {} dimensions", kMaxRank));
      sizes.push_back(size);
      if (take(')')) break;
      expect(',');
    }
    return sizes;
  }

  const std::string& path_;
  std::string_view text_;
  std::size_t at_ = 0;
  Dictionary dictionary_;
};

// Where the header begins, and its length as the file claims it.
std::pair<std::uint64_t, std::uint64_t> header_place(const InputFile& file) {
  const auto fail = [&](const std::string& text) {
    throw Error(ErrorCode::io, fmt::format("{}: {}", file.path(), text));
  };
  if (file.bytes() < kVersionEnd + 2) {
    fail(fmt::format("has {} bytes, a .npy file has at least {}", file.bytes(), kVersionEnd + 2));
  }
  std::array<char, kVersionEnd> start{};
  file.read_at(0, std::as_writable_bytes(std::span(start)), "the magic");
  if (std::string_view(start.data(), kMagic.size()) != kMagic) {
    fail("does not begin with the magic of NumPy: this is not a .npy file");
  }
  const int major = static_cast<unsigned char>(start[6]);
  const int minor = static_cast<unsigned char>(start[7]);
  if (major < 1 || major > 3 || minor != 0) {
    fail(fmt::format("has version {}.{}, expected 1.0, 2.0 or 3.0", major, minor));
  }
  const std::uint64_t length_bytes = major == 1 ? 2 : 4;
  const std::uint64_t begin = kVersionEnd + length_bytes;
  if (file.bytes() < begin) {
    fail(fmt::format("has {} bytes, one of this version at least {}", file.bytes(), begin));
  }
  std::uint32_t length = 0;
  file.read_at(kVersionEnd, std::as_writable_bytes(std::span(&length, 1)).first(length_bytes),
               "the header's length");
  return {begin, length};
}

std::string dtype_of(const std::string& path, const std::string& descr) {
  for (const Name& name : kNames) {
    if (name.descr == descr) return std::string(name.dtype);
  }
  const bool two_bytes = descr == "|V2" || descr == "<V2" || descr.find("bfloat16") != descr.npos;
  throw Error(ErrorCode::io,
              fmt::format("{}: the dtype {} is not taken: expected <f2, <f4 or <f8{}", path,
                          printable(descr),
                          two_bytes ? "; .npy has no bf16, a safetensors file does" : ""));
}

}  // namespace

NpyReader::NpyReader(const std::string& path) : file_(path) {
  const auto fail = [&](const std::string& text) {
    throw Error(ErrorCode::io, fmt::format("{}: {}", path, text));
  };
  const auto [begin, length] = header_place(file_);
  if (length > file_.bytes() - begin) {
    fail(fmt::format("claims a header of {} bytes, but has {} after the length", length,
                     file_.bytes() - begin));
  }
  if (length > kMaxNpyHeader) {
    fail(fmt::format("claims a header of {} bytes, more than the limit of {}", length,
                     kMaxNpyHeader));
  }
  std::string text(length, '\0');
  file_.read_at(begin, std::as_writable_bytes(std::span(text)), "the header");
  const Dictionary dictionary = DictionaryParser(path, text).parse();
  if (!dictionary.descr) fail("the header has no descr");
  if (!dictionary.fortran_order) fail("the header has no fortran_order");
  if (!dictionary.shape) fail("the header has no shape");
  dtype_ = dtype_of(path, *dictionary.descr);
  shape_ = *dictionary.shape;
  if (*dictionary.fortran_order && shape_.size() > 1) {
    fail("is in Fortran order, expected C order: numpy.ascontiguousarray makes it so");
  }
  data_start_ = begin + length;
  std::uint64_t expected = 0;
  const std::string what = fmt::format("{} of shape {}", *dictionary.descr, shape_text(shape_));
  if (!tensor_bytes(shape_, element_bytes(dtype_), expected)) {
    fail(fmt::format("{} has more than 2^64-1 bytes", what));
  }
  if (expected != bytes()) {
    fail(fmt::format("{} has {} bytes, the file has {} for it", what, expected, bytes()));
  }
}

Bytes NpyReader::read() const { return file_.read_at(data_start_, bytes(), "the data"); }

std::string npy_obstacle(const std::string& dtype) {
  for (const Name& name : kNames) {
    if (name.dtype == dtype) return {};
  }
  return fmt::format(".npy has no {}: write a safetensors file", dtype == "BF16" ? "bf16" : dtype);
}

void write_npy(const std::string& path, const std::string& dtype,
               std::span<const std::int64_t> shape, std::span<const std::byte> data,
               const std::function<bool()>& interrupted) {
  const auto fail = [&](const std::string& text) {
    throw Error(ErrorCode::invalid_argument, fmt::format("{}: {}", path, text));
  };
  if (const std::string obstacle = npy_obstacle(dtype); !obstacle.empty()) fail(obstacle);
  std::uint64_t expected = 0;
  if (shape.size() > kMaxRank || !tensor_bytes(shape, element_bytes(dtype), expected) ||
      expected != data.size()) {
    fail(fmt::format("{} of shape {} does not have {} bytes", dtype, shape_text(shape),
                     data.size()));
  }
  std::string_view descr;
  for (const Name& name : kNames) {
    if (name.dtype == dtype) descr = name.descr;
  }
  // A tuple of one needs its comma.
  std::string text = fmt::format("{{'descr': '{}', 'fortran_order': False, 'shape': ({}{}), }}",
                                 descr, fmt::join(shape, ", "), shape.size() == 1 ? "," : "");
  const std::size_t begin = kVersionEnd + 2;
  const std::size_t end =
      (begin + text.size() + 1 + kDataAlignment - 1) / kDataAlignment * kDataAlignment;
  text.resize(end - begin - 1, ' ');
  text += '\n';
  const auto length = static_cast<std::uint16_t>(text.size());
  const std::string start = std::string(kMagic) + std::string("\x01\x00", 2);

  OutputFile file(path, interrupted);
  file.write(std::as_bytes(std::span(start)));
  file.write(std::as_bytes(std::span(&length, 1)));
  file.write(std::as_bytes(std::span(text)));
  file.write(data);
  file.rename_to_target();
}

}  // namespace lln::io
