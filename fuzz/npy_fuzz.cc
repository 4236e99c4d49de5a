// Any bytes as a .npy file: refused with an lln::Error, or read in full.
// SPDX-License-Identifier: Apache-2.0
#include "io/npy.h"
#include "lln/error.h"
#include "memory_file.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const lln::fuzz::MemoryFile file(data, size);
  try {
    const lln::io::NpyReader reader(file.path());
    if (reader.read().size() != reader.bytes() || reader.bytes() > size) std::abort();
  } catch (const lln::Error& e) {
    if (e.code() != lln::ErrorCode::io) std::abort();
  }
  return 0;
}
