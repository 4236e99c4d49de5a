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

namespace lln::io {

struct TensorInfo {
  std::string name;
  std::string dtype;                // as the format spells it: "F32", "BF16", "I64", "BOOL", ...
  std::vector<std::int64_t> shape;  // empty: one element
  std::uint64_t begin = 0;          // bytes, counted from the start of the data
  std::uint64_t end = 0;

  std::uint64_t bytes() const noexcept { return end - begin; }
};

using Metadata = std::map<std::string, std::string>;

// Bytes of one element, 0 for a dtype that is not known here.
std::size_t element_bytes(std::string_view dtype) noexcept;

// A name from a file, made fit for a message: in quotes, control characters escaped, cut when long.
std::string printable(std::string_view name);

// "[2, 3, 5]"
std::string shape_text(std::span<const std::int64_t> shape);

class SafetensorsReader {
 public:
  // Reads and checks the header; the data stay in the file until read() asks for them.
  explicit SafetensorsReader(const std::string& path);
  ~SafetensorsReader();
  SafetensorsReader(const SafetensorsReader&) = delete;
  SafetensorsReader& operator=(const SafetensorsReader&) = delete;

  const std::string& path() const noexcept { return path_; }
  const Metadata& metadata() const noexcept { return metadata_; }
  // In the order of their data. A tensor of an unknown dtype is listed, but read() refuses it.
  const std::vector<TensorInfo>& tensors() const noexcept { return tensors_; }
  const TensorInfo* find(std::string_view name) const noexcept;  // null: no such tensor

  Bytes read(const TensorInfo& tensor) const;

 private:
  void read_at(std::uint64_t offset, std::span<std::byte> into, const std::string& what) const;

  std::string path_;
  int file_ = -1;
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

// Writes all or nothing: a temporary file in the same folder is synchronised to disk and renamed
// over `path`, and removed when anything fails. The data start at a multiple of 8 bytes and every
// tensor at a multiple of its element. `interrupted` is asked every few MiB; once it says true the
// temporary file is removed and an Error thrown.
void write_safetensors(const std::string& path, std::span<const TensorToWrite> tensors,
                       const Metadata& metadata = {},
                       const std::function<bool()>& interrupted = {});

// Why `path` cannot be written, found out before the work that ends there; empty when it can.
std::string write_obstacle(const std::string& path);

}  // namespace lln::io
