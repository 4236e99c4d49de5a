// Writing of safetensors files: everything or nothing. The name appears only by the rename of a
// complete, synchronised file; until then the work is in a temporary file beside it.
// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "io/safetensors.h"
#include "io/safetensors_header.h"
#include "lln/error.h"

namespace lln::io {
namespace {

namespace fs = std::filesystem;

constexpr std::size_t kAlignment = 8;                 // of the start of the data
constexpr std::size_t kChunk = std::size_t{4} << 20;  // between two looks at `interrupted`
constexpr int kMaxNames = 100;                        // temporary names tried

std::string error_text(int code) { return std::strerror(code); }

fs::path folder_of(const std::string& path) {
  const fs::path folder = fs::path(path).parent_path();
  return folder.empty() ? fs::path(".") : folder;
}

// A file that removes itself unless it has been renamed to where it belongs.
class TemporaryFile {
 public:
  TemporaryFile(const std::string& target, const std::function<bool()>& interrupted)
      : target_(target), interrupted_(interrupted) {
    const fs::path folder = folder_of(target);
    const std::string stem = "." + fs::path(target).filename().string();
    for (int i = 0; i < kMaxNames; ++i) {
      name_ = (folder / fmt::format("{}.{}-{}.part", stem, ::getpid(), i)).string();
      file_ = ::open(name_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (file_ >= 0 || errno != EEXIST) break;
    }
    if (file_ < 0) fail("cannot be created in its folder");
  }
  ~TemporaryFile() {
    if (file_ >= 0) ::close(file_);
    if (!renamed_) ::unlink(name_.c_str());
  }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;

  void write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      check_interrupted();
      const ssize_t put = ::write(file_, bytes.data(), std::min(bytes.size(), kChunk));
      if (put < 0 && errno == EINTR) continue;
      if (put < 0) fail("cannot be written");
      bytes = bytes.subspan(static_cast<std::size_t>(put));
    }
  }

  void rename_to_target() {
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

 private:
  void check_interrupted() const {
    if (interrupted_ && interrupted_()) {
      throw Error(ErrorCode::io, target_ + ": writing was interrupted; nothing was left behind");
    }
  }
  [[noreturn]] void fail(const std::string& what) const {
    throw Error(ErrorCode::io, fmt::format("{}: {}: {}", target_, what, error_text(errno)));
  }

  std::string target_;
  const std::function<bool()>& interrupted_;
  std::string name_;
  int file_ = -1;
  bool renamed_ = false;
};

void check_tensors(const std::string& path, std::span<const TensorToWrite> tensors) {
  std::set<std::string_view> names;
  for (const TensorToWrite& t : tensors) {
    const auto fail = [&](const std::string& text) {
      throw Error(ErrorCode::invalid_argument,
                  fmt::format("{}: tensor {}: {}", path, printable(t.name), text));
    };
    if (t.name == kMetadataName) fail("the name is reserved");
    if (!names.insert(t.name).second) fail("occurs twice");
    const std::size_t element = element_bytes(t.dtype);
    if (element == 0) fail(fmt::format("the dtype {} is not known", printable(t.dtype)));
    std::uint64_t expected = 0;
    if (!tensor_bytes(t.shape, element, expected) || expected != t.data.size()) {
      fail(fmt::format("{} of shape {} does not have {} bytes", t.dtype, shape_text(t.shape),
                       t.data.size()));
    }
  }
}

std::string header_text(const std::string& path, std::span<const TensorToWrite* const> order,
                        const Metadata& metadata) {
  nlohmann::ordered_json header = nlohmann::ordered_json::object();
  if (!metadata.empty()) header[std::string(kMetadataName)] = metadata;
  std::uint64_t offset = 0;
  for (const TensorToWrite* t : order) {
    header[t->name] = {{"dtype", t->dtype},
                       {"shape", t->shape},
                       {"data_offsets", {offset, offset + t->data.size()}}};
    offset += t->data.size();
  }
  try {
    std::string text = header.dump();
    text.resize((text.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');
    return text;
  } catch (const nlohmann::json::exception& e) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("{}: a name or metadata is not UTF-8: {}", path, e.what()));
  }
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
                       error_text(errno));
  }
  return {};
}

void write_safetensors(const std::string& path, std::span<const TensorToWrite> tensors,
                       const Metadata& metadata, const std::function<bool()>& interrupted) {
  check_tensors(path, tensors);
  if (const std::string obstacle = write_obstacle(path); !obstacle.empty()) {
    throw Error(ErrorCode::io, obstacle);
  }
  // Large elements first: then every tensor is aligned to its element without holes.
  std::vector<const TensorToWrite*> order;
  for (const TensorToWrite& t : tensors) order.push_back(&t);
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return element_bytes(a->dtype) > element_bytes(b->dtype);
  });
  const std::string header = header_text(path, order, metadata);
  const std::uint64_t length = header.size();

  TemporaryFile file(path, interrupted);
  file.write(std::as_bytes(std::span(&length, 1)));
  file.write(std::as_bytes(std::span(header)));
  for (const TensorToWrite* t : order) file.write(t->data);
  file.rename_to_target();
}

}  // namespace lln::io
