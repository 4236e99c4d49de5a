// Any bytes as a safetensors file: refused with an lln::Error, or every tensor can be read in full.
// SPDX-License-Identifier: Apache-2.0
#include "io/safetensors.h"
#include "lln/error.h"
#include "memory_file.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const lln::fuzz::MemoryFile file(data, size);
  try {
    const lln::io::SafetensorsReader reader(file.path());
    for (const lln::io::TensorInfo& tensor : reader.tensors()) {
      if (tensor.bytes() > size) std::abort();
      if (lln::io::element_bytes(tensor.dtype) == 0) continue;
      if (reader.read(tensor).size() != tensor.bytes()) std::abort();
    }
  } catch (const lln::Error& e) {
    if (e.code() != lln::ErrorCode::io) std::abort();
  }
  return 0;
}
