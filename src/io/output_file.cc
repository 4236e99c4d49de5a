// Writing of whole files.
// SPDX-License-Identifier: Apache-2.0
#include "io/output_file.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <utility>

#include "lln/error.h"

namespace lln::io {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kChunk = std::size_t{4} << 20;  // between two looks at `interrupted`
constexpr int kMaxNames = 100;                        // temporary names tried

fs::path folder_of(const std::string& path) {
  const fs::path folder = fs::path(path).parent_path();
  return folder.empty() ? fs::path(".") : folder;
}

}  // namespace

std::string write_obstacle(const std::string& path) {
  const fs::path folder = folder_of(path);
  struct stat status {};
  if (::lstat(path.c_str(), &status) == 0 && !S_ISREG(status.st_mode)) {
    return path + ": exists and is not a regular file";
  }
  if (::stat(folder.c_str(), &status) != 0 || !S_ISDIR(status.st_mode)) {
    return fmt::format("{}: there is no folder {}", path, folder.string());
  }
  if (::access(folder.c_str(), W_OK | X_OK) != 0) {
    return fmt::format("{}: the folder {} cannot be written: {}", path, folder.string(),
                       std::strerror(errno));
  }
  return {};
}

OutputFile::OutputFile(const std::string& target, const std::function<bool()>& interrupted)
    : target_(target), interrupted_(interrupted) {
  if (const std::string obstacle = write_obstacle(target); !obstacle.empty()) {
    throw Error(ErrorCode::io, obstacle);
  }
  const fs::path folder = folder_of(target);
  const std::string stem = "." + fs::path(target).filename().string();
  for (int i = 0; i < kMaxNames; ++i) {
    name_ = (folder / fmt::format("{}.{}-{}.part", stem, ::getpid(), i)).string();
    file_ = ::open(name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (file_ >= 0 || errno != EEXIST) break;
  }
  if (file_ < 0) fail("cannot be created in its folder");
}

OutputFile::~OutputFile() {
  if (file_ >= 0) ::close(file_);
  if (!renamed_) ::unlink(name_.c_str());
}

void OutputFile::write(std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    check_interrupted();
    const ssize_t put = ::write(file_, bytes.data(), std::min(bytes.size(), kChunk));
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail("cannot be written");
    bytes = bytes.subspan(static_cast<std::size_t>(put));
  }
}

void OutputFile::rename_to_target() {
  if (::fsync(file_) != 0) fail("cannot be synchronised to disk");
  if (::close(std::exchange(file_, -1)) != 0) fail("cannot be closed");
  check_interrupted();
  if (::rename(name_.c_str(), target_.c_str()) != 0) fail("cannot be put in place");
  renamed_ = true;
  // The rename itself reaches the disk with the folder; a folder that cannot be opened or
  // synchronised (some network file systems) loses durability, not correctness.
  const int folder = ::open(folder_of(target_).c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder >= 0) {
    ::fsync(folder);
    ::close(folder);
  }
}

void OutputFile::check_interrupted() const {
  if (interrupted_ && interrupted_()) {
    throw Error(ErrorCode::io, target_ + ": writing was interrupted; nothing was left behind");
  }
}

void OutputFile::fail(const std::string& what) const {
  throw Error(ErrorCode::io, fmt::format("{}: {}: {}", target_, what, std::strerror(errno)));
}

}  // namespace lln::io
