// Reading of safetensors files by pread into memory of the right size. Not by mmap: a mapped file
// that shrinks kills the process, and tensors may lie at any alignment.
// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <new>
#include <utility>

#include "io/safetensors.h"
#include "io/safetensors_header.h"
#include "lln/error.h"

namespace lln::io {
namespace {

static_assert(std::endian::native == std::endian::little, "files are little endian");

constexpr std::uint64_t kLengthBytes = 8;
constexpr std::size_t kMaxRead = std::size_t{1} << 30;  // Linux reads at most 2 GiB at once

[[noreturn]] void fail(const std::string& path, const std::string& text) {
  throw Error(ErrorCode::io, path + ": " + text);
}

std::string error_text(int code) { return std::strerror(code); }

// Closes the file unless it is released: the constructor below may throw.
class OpenFile {
 public:
  explicit OpenFile(int file) : file_(file) {}
  ~OpenFile() {
    if (file_ >= 0) ::close(file_);
  }
  OpenFile(const OpenFile&) = delete;
  OpenFile& operator=(const OpenFile&) = delete;
  int release() { return std::exchange(file_, -1); }

 private:
  int file_;
};

}  // namespace

SafetensorsReader::SafetensorsReader(const std::string& path) : path_(path) {
  // O_NONBLOCK: opening a pipe must fail below instead of waiting for a writer.
  file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file_ < 0) fail(path, "cannot be opened: " + error_text(errno));
  OpenFile open_file(file_);
  struct stat status {};
  if (::fstat(file_, &status) != 0) fail(path, "cannot be examined: " + error_text(errno));
  if (!S_ISREG(status.st_mode)) fail(path, "is not a regular file");
  const auto file_bytes = static_cast<std::uint64_t>(status.st_size);
  if (file_bytes < kLengthBytes) {
    fail(path,
         fmt::format("has {} bytes, a safetensors file has at least {}", file_bytes, kLengthBytes));
  }
  std::uint64_t header_bytes = 0;
  read_at(0, std::as_writable_bytes(std::span(&header_bytes, 1)), "the header's length");
  if (header_bytes > file_bytes - kLengthBytes) {
    fail(path, fmt::format("claims a header of {} bytes, but has {} after the length", header_bytes,
                           file_bytes - kLengthBytes));
  }
  if (header_bytes > kMaxHeaderBytes) {
    fail(path, fmt::format("claims a header of {} bytes, more than the limit of {}", header_bytes,
                           kMaxHeaderBytes));
  }
  std::string text(header_bytes, '\0');
  read_at(kLengthBytes, std::as_writable_bytes(std::span(text)), "the header");
  data_start_ = kLengthBytes + header_bytes;
  Header header = parse_header(path, text, file_bytes - data_start_);
  metadata_ = std::move(header.metadata);
  tensors_ = std::move(header.tensors);
  open_file.release();
}

SafetensorsReader::~SafetensorsReader() { ::close(file_); }

const TensorInfo* SafetensorsReader::find(std::string_view name) const noexcept {
  const auto it = std::find_if(tensors_.begin(), tensors_.end(),
                               [&](const TensorInfo& t) { return t.name == name; });
  return it == tensors_.end() ? nullptr : &*it;
}

Bytes SafetensorsReader::read(const TensorInfo& tensor) const {
  const std::string what = "tensor " + printable(tensor.name);
  if (element_bytes(tensor.dtype) == 0) {
    fail(path_, fmt::format("{}: the dtype {} is not known", what, printable(tensor.dtype)));
  }
  try {
    Bytes bytes(tensor.bytes());
    read_at(data_start_ + tensor.begin, {bytes.data(), bytes.size()}, what);
    return bytes;
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::out_of_memory,
                fmt::format("{}: {}: no memory for {} bytes", path_, what, tensor.bytes()));
  }
}

void SafetensorsReader::read_at(std::uint64_t offset, std::span<std::byte> into,
                                const std::string& what) const {
  std::size_t done = 0;
  while (done < into.size()) {
    const ssize_t got = ::pread(file_, into.data() + done, std::min(into.size() - done, kMaxRead),
                                static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail(path_, fmt::format("{}: cannot be read: {}", what, error_text(errno)));
    if (got == 0) {
      fail(path_, fmt::format("{}: the file ended {} bytes too early while it was read", what,
                              into.size() - done));
    }
    done += static_cast<std::size_t>(got);
  }
}

}  // namespace lln::io
