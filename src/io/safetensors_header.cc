// Parsing and checking of the header. The JSON is walked by events rather than loaded as a tree:
// duplicate names are seen, nesting is bounded by the states below, and a header of N bytes never
// takes more than a small multiple of N bytes of memory.
// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors_header.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <nlohmann/json.hpp>
#include <tuple>
#include <utility>

#include "lln/error.h"

namespace lln::io {
namespace {

using Json = nlohmann::json;

constexpr std::size_t kMaxRank = 64;

constexpr std::array<std::pair<std::string_view, std::size_t>, 15> kElementBytes = {{
    {"BOOL", 1},
    {"U8", 1},
    {"I8", 1},
    {"F8_E4M3", 1},
    {"F8_E5M2", 1},
    {"I16", 2},
    {"U16", 2},
    {"F16", 2},
    {"BF16", 2},
    {"I32", 4},
    {"U32", 4},
    {"F32", 4},
    {"I64", 8},
    {"U64", 8},
    {"F64", 8},
}};

class HeaderEvents final : public nlohmann::json_sax<Json> {
 public:
  explicit HeaderEvents(const std::string& path) : path_(path) {}

  Header header;

  bool null() override { return unexpected("null"); }
  bool boolean(bool value) override { return unexpected(value ? "true" : "false"); }
  bool number_integer(number_integer_t value) override {
    if (where_ == Where::shape || where_ == Where::offsets) {
      fail(fmt::format("{} has the negative number {}", field_, value));
    }
    return unexpected(std::to_string(value));
  }
  bool number_unsigned(number_unsigned_t value) override {
    if (where_ == Where::shape) return add_dimension(value);
    if (where_ == Where::offsets) return add_offset(value);
    return unexpected(std::to_string(value));
  }
  bool number_float(number_float_t, const string_t& text) override {
    return unexpected("the number " + text.substr(0, kMaxPrinted));
  }
  bool string(string_t& value) override {
    if (where_ == Where::metadata) {
      if (!header.metadata.emplace(field_, value).second) {
        fail(fmt::format("the field {} occurs twice", printable(field_)));
      }
      return true;
    }
    if (where_ == Where::tensor && field_ == "dtype") {
      tensor_.dtype = value;
      return true;
    }
    return unexpected("the string " + printable(value));
  }
  bool binary(binary_t&) override { return unexpected("binary data"); }

  bool start_object(std::size_t) override {
    if (where_ == Where::outside) {
      where_ = Where::top;
    } else if (where_ == Where::top) {
      if (name_ == kMetadataName) {
        if (std::exchange(has_metadata_, true)) fail("__metadata__ occurs twice");
        where_ = Where::metadata;
        return true;
      }
      where_ = Where::tensor;
      tensor_ = {};
      tensor_.name = name_;
      offset_count_ = 0;
      has_dtype_ = has_shape_ = has_offsets_ = false;
    } else {
      return unexpected("an object");
    }
    return true;
  }
  bool key(string_t& value) override {
    if (where_ == Where::top) {
      name_ = value;
    } else {
      field_ = value;
      if (where_ == Where::tensor) open_field();
    }
    return true;
  }
  bool end_object() override {
    if (where_ == Where::tensor) close_tensor();
    where_ = where_ == Where::top ? Where::outside : Where::top;
    return true;
  }
  bool start_array(std::size_t) override {
    if (where_ == Where::tensor && field_ == "shape") {
      where_ = Where::shape;
    } else if (where_ == Where::tensor && field_ == "data_offsets") {
      where_ = Where::offsets;
    } else {
      return unexpected("an array");
    }
    return true;
  }
  bool end_array() override {
    if (where_ == Where::offsets && offset_count_ != 2) {
      fail(fmt::format("data_offsets has {} numbers, expected 2", offset_count_));
    }
    where_ = Where::tensor;
    return true;
  }
  bool parse_error(std::size_t position, const std::string&, const Json::exception&) override {
    throw Error(ErrorCode::io,
                fmt::format("{}: the header is not valid JSON at byte {} of it", path_, position));
  }

 private:
  enum class Where { outside, top, metadata, tensor, shape, offsets };

  [[noreturn]] void fail(const std::string& text) const {
    const bool in_entry = where_ != Where::outside && where_ != Where::top;
    throw Error(ErrorCode::io, in_entry
                                   ? fmt::format("{}: tensor {}: {}", path_, printable(name_), text)
                                   : fmt::format("{}: {}", path_, text));
  }

  // Says what was expected where the event arrived.
  bool unexpected(const std::string& found) const {
    switch (where_) {
      case Where::outside:
        fail(fmt::format("the header is {}, expected an object", found));
      case Where::top:
        throw Error(ErrorCode::io, fmt::format("{}: tensor {}: the entry is {}, expected an object",
                                               path_, printable(name_), found));
      case Where::metadata:
        fail(fmt::format("the field {} is {}, expected a string", printable(field_), found));
      case Where::tensor:
        fail(fmt::format("{} is {}, expected {}", field_, found,
                         field_ == "dtype" ? "a string" : "an array of integers"));
      case Where::shape:
      case Where::offsets:
        fail(fmt::format("{} has {}, expected integers from 0 to 2^63-1", field_, found));
    }
    return false;
  }

  void open_field() {
    bool* seen = field_ == "dtype"          ? &has_dtype_
                 : field_ == "shape"        ? &has_shape_
                 : field_ == "data_offsets" ? &has_offsets_
                                            : nullptr;
    if (seen == nullptr) fail(fmt::format("the field {} is not known", printable(field_)));
    if (*seen) fail(fmt::format("the field {} occurs twice", field_));
    *seen = true;
  }

  void close_tensor() {
    const char* missing = !has_dtype_     ? "dtype"
                          : !has_shape_   ? "shape"
                          : !has_offsets_ ? "data_offsets"
                                          : nullptr;
    if (missing != nullptr) fail(fmt::format("the field {} is missing", missing));
    header.tensors.push_back(std::move(tensor_));
  }

  bool add_dimension(std::uint64_t value) {
    if (value > static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max())) {
      return unexpected(std::to_string(value));
    }
    if (tensor_.shape.size() == kMaxRank) {
      fail(fmt::format("shape has more than {} dimensions", kMaxRank));
    }
    tensor_.shape.push_back(static_cast<std::int64_t>(value));
    return true;
  }

  bool add_offset(std::uint64_t value) {
    if (offset_count_ == 2) fail("data_offsets has more than 2 numbers");
    (offset_count_++ == 0 ? tensor_.begin : tensor_.end) = value;
    return true;
  }

  const std::string& path_;
  Where where_ = Where::outside;
  std::string name_;   // key of the entry being read
  std::string field_;  // key inside that entry
  TensorInfo tensor_;
  int offset_count_ = 0;
  bool has_metadata_ = false;
  bool has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
};

void check_names(const std::string& path, const std::vector<TensorInfo>& tensors) {
  std::vector<std::string_view> names;
  names.reserve(tensors.size());
  for (const TensorInfo& t : tensors) names.push_back(t.name);
  std::sort(names.begin(), names.end());
  const auto twice = std::adjacent_find(names.begin(), names.end());
  if (twice != names.end()) {
    throw Error(ErrorCode::io, fmt::format("{}: tensor {} occurs twice", path, printable(*twice)));
  }
}

void check_size(const std::string& path, const TensorInfo& t, std::uint64_t data_bytes) {
  const auto fail = [&](const std::string& text) {
    throw Error(ErrorCode::io, fmt::format("{}: tensor {}: {}", path, printable(t.name), text));
  };
  if (t.begin > t.end) fail(fmt::format("data_offsets [{}, {}] run backwards", t.begin, t.end));
  if (t.end > data_bytes) {
    fail(fmt::format("data_offsets [{}, {}] reach beyond the {} bytes of data in the file", t.begin,
                     t.end, data_bytes));
  }
  const std::size_t element = element_bytes(t.dtype);
  if (element == 0) return;
  std::uint64_t expected = 0;
  if (!tensor_bytes(t.shape, element, expected)) {
    fail(fmt::format("{} of shape {} has more than 2^64-1 bytes", t.dtype, shape_text(t.shape)));
  }
  if (expected != t.bytes()) {
    fail(fmt::format("{} of shape {} has {} bytes, but data_offsets [{}, {}] hold {}", t.dtype,
                     shape_text(t.shape), expected, t.begin, t.end, t.bytes()));
  }
}

// Tensors sorted by offset must follow each other without overlap or hole, up to the last byte.
void check_coverage(const std::string& path, const std::vector<TensorInfo>& tensors,
                    std::uint64_t data_bytes) {
  std::uint64_t covered = 0;
  const TensorInfo* previous = nullptr;
  for (const TensorInfo& t : tensors) {
    if (t.begin < covered) {
      throw Error(ErrorCode::io,
                  fmt::format("{}: tensor {}: data_offsets [{}, {}] overlap [{}, {}] of tensor {}",
                              path, printable(t.name), t.begin, t.end, previous->begin,
                              previous->end, printable(previous->name)));
    }
    if (t.begin > covered) {
      throw Error(
          ErrorCode::io,
          fmt::format("{}: tensor {}: data_offsets [{}, {}] leave bytes {} to {} of the data "
                      "unused",
                      path, printable(t.name), t.begin, t.end, covered, t.begin));
    }
    covered = t.end;
    previous = &t;
  }
  if (covered != data_bytes) {
    throw Error(ErrorCode::io,
                fmt::format("{}: the tensors have {} bytes, the file has {} for them", path,
                            covered, data_bytes));
  }
}

}  // namespace

std::size_t element_bytes(std::string_view dtype) noexcept {
  for (const auto& [name, bytes] : kElementBytes) {
    if (name == dtype) return bytes;
  }
  return 0;
}

std::string shape_text(std::span<const std::int64_t> shape) {
  return fmt::format("[{}]", fmt::join(shape, ", "));
}

bool tensor_bytes(std::span<const std::int64_t> shape, std::size_t element, std::uint64_t& bytes) {
  bytes = element;
  for (const std::int64_t dimension : shape) {
    if (dimension < 0 ||
        __builtin_mul_overflow(bytes, static_cast<std::uint64_t>(dimension), &bytes)) {
      return false;
    }
  }
  return true;
}

Header parse_header(const std::string& path, std::string_view text, std::uint64_t data_bytes) {
  if (text.empty() || text.front() != '{') {
    throw Error(ErrorCode::io,
                fmt::format("{}: the header of {} bytes does not begin with '{{': this is not a "
                            "safetensors file",
                            path, text.size()));
  }
  HeaderEvents events(path);
  Json::sax_parse(text.begin(), text.end(), &events);
  Header header = std::move(events.header);
  check_names(path, header.tensors);
  for (const TensorInfo& t : header.tensors) check_size(path, t, data_bytes);
  std::sort(header.tensors.begin(), header.tensors.end(),
            [](const TensorInfo& a, const TensorInfo& b) {
              return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
            });
  check_coverage(path, header.tensors, data_bytes);
  return header;
}

}  // namespace lln::io
