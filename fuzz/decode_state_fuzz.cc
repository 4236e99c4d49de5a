// Any bytes given as a saved decode state: refused with an lln::Error, or whole.
// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>
#include <span>

#include "lln/decode.h"
#include "lln/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  try {
    (void)lln::saved_decode_config(std::as_bytes(std::span(data, size)));
  } catch (const lln::Error&) {
    return 0;
  }
  return 0;
}
