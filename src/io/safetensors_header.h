// The header of a safetensors file, apart from files: text in, checked tensors out. Separate so
// that the reader holds no JSON and the rules of the format stand in one place.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "io/safetensors.h"

namespace lln::io {

// Longer headers are refused, as the format's own library does.
inline constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;

inline constexpr std::string_view kMetadataName = "__metadata__";

struct Header {
  Metadata metadata;
  std::vector<TensorInfo> tensors;  // in the order of their data
};

// `data_bytes` is what the file has after the header; the tensors must cover it exactly.
Header parse_header(const std::string& path, std::string_view text, std::uint64_t data_bytes);

// Bytes of a tensor; false when the product does not fit.
bool tensor_bytes(std::span<const std::int64_t> shape, std::size_t element, std::uint64_t& bytes);

}  // namespace lln::io
