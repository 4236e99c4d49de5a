// Lets one allocation of the test program fail, so that a test can see what a call leaves behind
// then. Not under a sanitizer, which has allocation functions of its own.
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace lln::test {

bool allocations_can_fail();
// The allocation after `passed` others throws std::bad_alloc, once.
void fail_allocation_after(int passed);
// No allocation fails any more. True where one has.
bool stop_failing();

}  // namespace lln::test
