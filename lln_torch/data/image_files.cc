// Names decide everything: the split and the class of a file are parts of its path.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/image_files.h"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <optional>
#include <span>

#include "io/input_file.h"
#include "lln/error.h"

namespace lln_torch {
namespace {

bool is_jpeg_name(const std::string& name) {
  std::string ending = std::filesystem::path(name).extension().string();
  std::transform(ending.begin(), ending.end(), ending.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  // "._x.jpg" are notes of macOS beside the files, in many published tars.
  return (ending == ".jpg" || ending == ".jpeg") &&
         !std::filesystem::path(name).filename().string().starts_with("._");
}

std::optional<Split> split_named(const std::string& folder) {
  if (folder == "train") return Split::train;
  if (folder == "validation" || folder == "valid" || folder == "val") return Split::validation;
  if (folder == "test") return Split::test;
  return std::nullopt;
}

std::vector<std::string> path_parts(const std::string& name) {
  std::vector<std::string> parts;
  for (const auto& part : std::filesystem::path(name)) parts.push_back(part.string());
  return parts;
}

}  // namespace

ImageFiles::ImageFiles(const std::string& path) : path_(path) {
  namespace fs = std::filesystem;
  try {
    if (fs::is_directory(path)) {
      for (const auto& entry : fs::recursive_directory_iterator(
               path, fs::directory_options::follow_directory_symlink)) {
        if (entry.is_regular_file() && is_jpeg_name(entry.path().string())) {
          add(entry.path().lexically_relative(path).string(), 0);
        }
      }
    } else {
      tar_ = std::make_unique<TarFile>(path, is_jpeg_name);
      for (std::size_t i = 0; i < tar_->size(); ++i) add(tar_->name(i), i);
    }
  } catch (const fs::filesystem_error& error) {
    throw lln::Error(lln::ErrorCode::io, fmt::format("{}: {}", path, error.what()));
  }
  classes_ = file_classes_[0];
  std::sort(classes_.begin(), classes_.end());
  classes_.erase(std::unique(classes_.begin(), classes_.end()), classes_.end());
  if (classes_.size() < 2) {
    throw lln::Error(lln::ErrorCode::io,
                     fmt::format("{}: expected train/CLASS/*.jpg of at least 2 classes, found {} "
                                 "files in {}",
                                 path, files_[0].size(),
                                 classes_.empty() ? "none" : "one, " + classes_.front()));
  }
  for (std::size_t split = 0; split < files_.size(); ++split) {
    for (std::size_t i = 0; i < files_[split].size(); ++i) {
      const auto found =
          std::lower_bound(classes_.begin(), classes_.end(), file_classes_[split][i]);
      if (found == classes_.end() || *found != file_classes_[split][i]) {
        throw lln::Error(lln::ErrorCode::io,
                         fmt::format("{}: the class {} is not in train",
                                     full_name(files_[split][i]), file_classes_[split][i]));
      }
      files_[split][i].label = static_cast<std::int32_t>(found - classes_.begin());
    }
    file_classes_[split].clear();
    // The order of a folder is the file system's; that of examples must not be.
    std::sort(files_[split].begin(), files_[split].end(),
              [](const ImageFile& a, const ImageFile& b) { return a.name < b.name; });
  }
}

void ImageFiles::add(const std::string& name, std::size_t where) {
  const std::vector<std::string> parts = path_parts(name);
  for (std::size_t i = 0; i + 2 < parts.size(); ++i) {
    if (const std::optional<Split> split = split_named(parts[i])) {
      files_[static_cast<std::size_t>(*split)].push_back({name, 0, where});
      file_classes_[static_cast<std::size_t>(*split)].push_back(parts[i + 1]);
      return;
    }
  }
}

std::vector<std::uint8_t> ImageFiles::read(const ImageFile& file) const {
  if (tar_ != nullptr) return tar_->read(file.where);
  const lln::io::InputFile input(full_name(file));
  std::vector<std::uint8_t> bytes(input.bytes());
  input.read_at(0, std::as_writable_bytes(std::span(bytes)), "picture");
  return bytes;
}

std::string ImageFiles::full_name(const ImageFile& file) const {
  return tar_ != nullptr ? path_ + ":" + file.name
                         : (std::filesystem::path(path_) / file.name).string();
}

}  // namespace lln_torch
