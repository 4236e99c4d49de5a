// JPEG files sorted into classes: SPLIT/CLASS/*.jpg in a folder, or in a tar of the same layout.
// The split is train, validation (also val, valid) or test; folders above it and below the class
// are passed over.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "lln_torch/data/generated.h"
#include "lln_torch/data/packed_file.h"

namespace lln_torch {

struct ImageFile {
  std::string name;        // as in the folder or the tar
  std::int32_t label = 0;  // of classes()
  std::size_t where = 0;   // member of the tar
};

class ImageFiles {
 public:
  // Throws lln::Error (io) where there is no train/CLASS/*.jpg.
  explicit ImageFiles(const std::string& path);

  const std::vector<std::string>& classes() const { return classes_; }  // sorted, those of train
  const std::vector<ImageFile>& files(Split split) const {
    return files_[static_cast<std::size_t>(split)];
  }
  std::vector<std::uint8_t> read(const ImageFile& file) const;
  std::string full_name(const ImageFile& file) const;  // for messages

 private:
  void add(const std::string& name, std::size_t where);

  std::string path_;
  std::unique_ptr<TarFile> tar_;  // none: a folder
  std::vector<std::string> classes_;
  std::array<std::vector<ImageFile>, 3> files_;
  std::array<std::vector<std::string>, 3> file_classes_;  // while files are found
};

}  // namespace lln_torch
