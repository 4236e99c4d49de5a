// Tensors that come as one .npy file each, under the names that they would have in a safetensors
// file.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "io/npy.h"
#include "io/tensor_source.h"

namespace lln::cli {

class NpyFiles final : public io::TensorSource {
 public:
  // Pairs of name and path; reads and checks all headers.
  explicit NpyFiles(const std::vector<std::pair<std::string, std::string>>& files);

  const std::string& path() const noexcept override { return paths_; }
  const std::vector<io::TensorInfo>& tensors() const noexcept override { return tensors_; }
  io::Bytes read(const io::TensorInfo& tensor) const override;

 private:
  std::string paths_;
  std::deque<io::NpyReader> readers_;  // in the order of tensors_; a reader does not move
  std::vector<io::TensorInfo> tensors_;
};

}  // namespace lln::cli
