// The safetensors format: 8 bytes with the length of a header (little endian), the header as JSON
// (name -> dtype, shape, data_offsets; "__metadata__" -> strings), then the data without holes.
// The reader believes no length: whatever a file claims is compared with what the file has before
// memory is allocated. Every fault is one lln::Error with ErrorCode::io and all values in its text.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "io/bytes.h"
#include "io/input_file.h"
#include "io/printable.h"
#include "io/tensor_source.h"

namespace lln::io {

using Metadata = std::map<std::string, std::string>;

// Bytes of one element, 0 for a dtype that is not known here.
std::size_t element_bytes(std::string_view dtype) noexcept;

// "[2, 3, 5]"
std::string shape_text(std::span<const std::int64_t> shape);

class SafetensorsReader final : public TensorSource {
 public:
  // Reads and checks the header; the data stay in the file until read() asks for them.
  explicit SafetensorsReader(const std::string& path);

  const std::string& path() const noexcept override { return file_.path(); }
  const Metadata& metadata() const noexcept { return metadata_; }
  // In the order of their data. A tensor of an unknown dtype is listed, but read() refuses it.
  const std::vector<TensorInfo>& tensors() const noexcept override { return tensors_; }
  Bytes read(const TensorInfo& tensor) const override;

 private:
  InputFile file_;
  std::uint64_t data_start_ = 0;
  Metadata metadata_;
  std::vector<TensorInfo> tensors_;
};

struct TensorToWrite {
  std::string name;
  std::string dtype;
  std::vector<std::int64_t> shape;
  std::span<const std::byte> data;
};

// Writes all or nothing, by io/output_file.h. The data start at a multiple of 8 bytes and every
// tensor at a multiple of its element.
void write_safetensors(const std::string& path, std::span<const TensorToWrite> tensors,
                       const Metadata& metadata = {},
                       const std::function<bool()>& interrupted = {});

}  // namespace lln::io
