// The .npy format of NumPy for one tensor: a magic, a version, the length of a header, the header
// as the text of a Python dictionary, then the data. Taken are f2, f4 and f8, little endian, in C
// order; bf16 has no name in the format. As for safetensors, no length is believed and every fault
// is one lln::Error with ErrorCode::io and all values in its text.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "io/bytes.h"
#include "io/input_file.h"

namespace lln::io {

class NpyReader {
 public:
  // Reads and checks the header; the data stay in the file until read() asks for them.
  explicit NpyReader(const std::string& path);

  const std::string& path() const noexcept { return file_.path(); }
  const std::string& dtype() const noexcept { return dtype_; }  // "F16", "F32" or "F64"
  const std::vector<std::int64_t>& shape() const noexcept { return shape_; }  // empty: one element
  std::uint64_t bytes() const noexcept { return file_.bytes() - data_start_; }
  Bytes read() const;

 private:
  InputFile file_;
  std::string dtype_;
  std::vector<std::int64_t> shape_;
  std::uint64_t data_start_ = 0;
};

// Why a tensor of this dtype (spelled as in safetensors) cannot be written; empty when it can.
std::string npy_obstacle(const std::string& dtype);

// Writes all or nothing, as write_safetensors does. The data start at a multiple of 64 bytes.
void write_npy(const std::string& path, const std::string& dtype,
               std::span<const std::int64_t> shape, std::span<const std::byte> data,
               const std::function<bool()>& interrupted = {});

}  // namespace lln::io
