// Cases that nobody wrote down: the table meets what its authors thought of, these the rest. Each
// is a function of a seed and its place, so that one that fails is found again.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <vector>

#include "conformance/cases.h"

namespace lln::conformance {

// `count` of them; the first ones of more are the same.
std::vector<Case> random_cases(std::int64_t count, std::uint64_t seed);

}  // namespace lln::conformance
