// Named tensors that can be listed before they are read, wherever they come from: one safetensors
// file, or several .npy files.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "io/bytes.h"

namespace lln::io {

struct TensorInfo {
  std::string name;
  std::string dtype;                // as safetensors spells it: "F32", "BF16", "I64", "BOOL", ...
  std::vector<std::int64_t> shape;  // empty: one element
  std::uint64_t begin = 0;          // bytes, counted from the start of the data
  std::uint64_t end = 0;

  std::uint64_t bytes() const noexcept { return end - begin; }
};

class TensorSource {
 public:
  virtual ~TensorSource() = default;
  virtual const std::string& path() const noexcept = 0;  // for messages
  virtual const std::vector<TensorInfo>& tensors() const noexcept = 0;
  virtual Bytes read(const TensorInfo& tensor) const = 0;  // of the list above

  const TensorInfo* find(std::string_view name) const noexcept {  // null: no such tensor
    const auto it = std::find_if(tensors().begin(), tensors().end(),
                                 [&](const TensorInfo& t) { return t.name == name; });
    return it == tensors().end() ? nullptr : &*it;
  }
};

}  // namespace lln::io
