// Reading by pread into memory of the right size. Not by mmap: a mapped file that shrinks kills the
// process, and tensors may lie at any alignment.
// SPDX-License-Identifier: Apache-2.0
#include "io/input_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <new>

#include "lln/error.h"

namespace lln::io {
namespace {

static_assert(std::endian::native == std::endian::little, "files are little endian");

constexpr std::size_t kMaxRead = std::size_t{1} << 30;  // Linux reads at most 2 GiB at once

[[noreturn]] void fail(const std::string& path, const std::string& text) {
  throw Error(ErrorCode::io, path + ": " + text);
}

// Closes the file when what follows throws.
void examine(int file, const std::string& path, std::uint64_t& bytes) {
  struct stat status {};
  const bool known = ::fstat(file, &status) == 0;
  const int code = errno;
  if (known && S_ISREG(status.st_mode)) {
    bytes = static_cast<std::uint64_t>(status.st_size);
    return;
  }
  ::close(file);
  if (!known) fail(path, fmt::format("cannot be examined: {}", std::strerror(code)));
  fail(path, "is not a regular file");
}

}  // namespace

InputFile::InputFile(const std::string& path) : path_(path) {
  // O_NONBLOCK: opening a pipe must fail below instead of waiting for a writer.
  file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (file_ < 0) fail(path, fmt::format("cannot be opened: {}", std::strerror(errno)));
  examine(file_, path, bytes_);
}

InputFile::~InputFile() { ::close(file_); }

void InputFile::read_at(std::uint64_t offset, std::span<std::byte> into,
                        const std::string& what) const {
  std::size_t done = 0;
  while (done < into.size()) {
    const ssize_t got = ::pread(file_, into.data() + done, std::min(into.size() - done, kMaxRead),
                                static_cast<off_t>(offset + done));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) {
      fail(path_, fmt::format("{}: cannot be read: {}", what, std::strerror(errno)));
    }
    if (got == 0) {
      fail(path_, fmt::format("{}: the file ended {} bytes too early while it was read", what,
                              into.size() - done));
    }
    done += static_cast<std::size_t>(got);
  }
}

Bytes InputFile::read_at(std::uint64_t offset, std::uint64_t size, const std::string& what) const {
  try {
    Bytes bytes(size);
    read_at(offset, {bytes.data(), bytes.size()}, what);
    return bytes;
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::out_of_memory,
                fmt::format("{}: {}: no memory for {} bytes", path_, what, size));
  }
}

}  // namespace lln::io
