// Several .npy files as one source of tensors.
// SPDX-License-Identifier: Apache-2.0
#include "npy_files.h"

namespace lln::cli {

NpyFiles::NpyFiles(const std::vector<std::pair<std::string, std::string>>& files) {
  for (const auto& [name, path] : files) {
    const io::NpyReader& reader = readers_.emplace_back(path);
    tensors_.push_back({name, reader.dtype(), reader.shape(), 0, reader.bytes()});
    paths_ += (paths_.empty() ? "" : ", ") + path;
  }
}

io::Bytes NpyFiles::read(const io::TensorInfo& tensor) const {
  return readers_[static_cast<std::size_t>(&tensor - tensors_.data())].read();
}

}  // namespace lln::cli
