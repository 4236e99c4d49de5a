// The calls on real files.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/checkpoint_files.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <functional>

#include "io/output_file.h"
#include "lln/error.h"

namespace lln_torch {
namespace {

[[noreturn]] void fail_file(const std::string& path, const char* what, int error) {
  throw lln::Error(lln::ErrorCode::io, fmt::format("{}: {}: {}", path, what, std::strerror(error)));
}

}  // namespace

void CheckpointFiles::make_folder(const std::string& path) {
  if (::mkdir(path.c_str(), 0777) != 0) fail_file(path, "cannot be made", errno);
}

void CheckpointFiles::write_tensors(const std::string& path,
                                    std::span<const lln::io::TensorToWrite> tensors) {
  lln::io::write_safetensors(path, tensors);
}

void CheckpointFiles::write_text(const std::string& path, const std::string& text) {
  const std::function<bool()> never;
  lln::io::OutputFile file(path, never);
  file.write(std::as_bytes(std::span(text)));
  file.rename_to_target();
}

void CheckpointFiles::sync_folder(const std::string& path) {
  const int folder = ::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) fail_file(path, "cannot be opened", errno);
  const int failed = ::fsync(folder) != 0 ? errno : 0;
  ::close(folder);
  // Some network file systems cannot synchronise folders: durability is theirs then.
  if (failed != 0 && failed != EINVAL) fail_file(path, "cannot be synchronised to disk", failed);
}

void CheckpointFiles::rename(const std::string& from, const std::string& to) {
  if (::rename(from.c_str(), to.c_str()) != 0) fail_file(to, "cannot be put in place", errno);
}

void CheckpointFiles::remove(const std::string& path) {
  std::error_code error;
  std::filesystem::remove_all(path, error);
  if (error) fail_file(path, "cannot be removed", error.value());
}

}  // namespace lln_torch
