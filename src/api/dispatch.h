// Which kernel runs a problem.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>

#include "api/kernel.h"

namespace lln {

// The kernel named `forced`, or the first of the list that takes the problem. Throws an Error with
// every refusal when none does.
const Kernel& choose_kernel(const Problem& problem, std::string_view forced);

}  // namespace lln
