// Which rule a mode of matching follows for heads of a dim.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

#include "lln/moments.h"
#include "math/matching_rule.h"

namespace lln {

// Modes none and frozen have no rule and get an empty one. Where the mode follows the line,
// `options.constants` stand in place of those of the dim.
MatchingRule matching_rule(const MatchingOptions& options, std::int64_t dim);

}  // namespace lln
