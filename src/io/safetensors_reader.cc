// Reading of safetensors files: the header when opened, tensors when asked for.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <utility>

#include "io/safetensors.h"
#include "io/safetensors_header.h"
#include "lln/error.h"

namespace lln::io {
namespace {

constexpr std::uint64_t kLengthBytes = 8;

[[noreturn]] void fail(const std::string& path, const std::string& text) {
  throw Error(ErrorCode::io, path + ": " + text);
}

}  // namespace

SafetensorsReader::SafetensorsReader(const std::string& path) : file_(path) {
  if (file_.bytes() < kLengthBytes) {
    fail(path, fmt::format("has {} bytes, a safetensors file has at least {}", file_.bytes(),
                           kLengthBytes));
  }
  std::uint64_t header_bytes = 0;
  file_.read_at(0, std::as_writable_bytes(std::span(&header_bytes, 1)), "the header's length");
  if (header_bytes > file_.bytes() - kLengthBytes) {
    fail(path, fmt::format("claims a header of {} bytes, but has {} after the length", header_bytes,
                           file_.bytes() - kLengthBytes));
  }
  if (header_bytes > kMaxHeaderBytes) {
    fail(path, fmt::format("claims a header of {} bytes, more than the limit of {}", header_bytes,
                           kMaxHeaderBytes));
  }
  std::string text(header_bytes, '\0');
  file_.read_at(kLengthBytes, std::as_writable_bytes(std::span(text)), "the header");
  data_start_ = kLengthBytes + header_bytes;
  Header header = parse_header(path, text, file_.bytes() - data_start_);
  metadata_ = std::move(header.metadata);
  tensors_ = std::move(header.tensors);
}

Bytes SafetensorsReader::read(const TensorInfo& tensor) const {
  const std::string what = "tensor " + printable(tensor.name);
  if (element_bytes(tensor.dtype) == 0) {
    fail(path(), fmt::format("{}: the dtype {} is not known", what, printable(tensor.dtype)));
  }
  return file_.read_at(data_start_ + tensor.begin, tensor.bytes(), what);
}

}  // namespace lln::io
