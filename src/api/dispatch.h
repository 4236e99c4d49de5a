// Which kernel runs a problem, and running it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "api/validate.h"

namespace lln {

// The kernel named `forced`, or the first of the list that takes the problem. Throws an Error with
// every refusal when none does.
const Kernel& choose_kernel(const Problem& problem, std::string_view forced);

// Runs a call on the threads, in the memory and by the kernel of `exec`; `name` is for errors, all
// of which come before the kernel starts.
void run_call(const char* name, CheckedCall& checked, const Exec& exec);

}  // namespace lln
