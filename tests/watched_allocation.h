// Allocations of a test program: how large they were, and what happens when one fails.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace lln::test {

// The largest allocation since the last reset; 0 under a sanitizer, which keeps its own functions.
void largest_allocation_reset();
std::size_t largest_allocation();

// Whether allocations can be made to fail: not under a sanitizer.
bool allocations_can_fail();
// The allocation after `passed` others throws std::bad_alloc, once.
void fail_allocation_after(int passed);
// Ends that; returns whether one has failed.
bool stop_failing();

}  // namespace lln::test
