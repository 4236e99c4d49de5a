// Any bytes as the text of a calibration: refused with an lln::Error, or read such that what is
// written of it reads the same.
// SPDX-License-Identifier: Apache-2.0
#include "lln/calibration.h"

#include <cstdlib>

#include "lln/error.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string text(reinterpret_cast<const char*>(data), size);
  try {
    const lln::Calibration found = lln::parse_calibration(text, "input");
    if (lln::parse_calibration(lln::to_json(found), "written") != found) std::abort();
  } catch (const lln::Error& e) {
    if (e.code() != lln::ErrorCode::io) std::abort();
  }
  return 0;
}
