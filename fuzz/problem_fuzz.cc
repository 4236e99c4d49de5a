// Any text given to the parser of problems: refused with an lln::Error, or taken, and then the
// problem's own text means the same problem.
// SPDX-License-Identifier: Apache-2.0
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "lln/error.h"
#include "lln/problem.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  lln::Problem problem;
  try {
    problem = lln::parse_problem(text);
  } catch (const lln::Error&) {
    return 0;
  }
  if (lln::parse_problem(lln::to_string(problem)) != problem) std::abort();
  return 0;
}
