// The largest single allocation of the test program, so that a test can tell whether the reader
// believed a length. Always 0 under a sanitizer, which has allocation functions of its own.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace lln::io {

void largest_allocation_reset();
std::size_t largest_allocation();

}  // namespace lln::io
