// Sums over the tokens of one head, for the moments of q and k.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/rows.h"
#include "lln/moments.h"

namespace lln::cpu {

// Moments of all channels of rows [begin, end) whose mask byte is not zero; mask may be null and
// counts from row 0. Takes all four dtypes; nothing is read of rows that do not count.
Moments sum_moments(const ConstRows& rows, std::int64_t begin, std::int64_t end,
                    const std::uint8_t* mask, std::int64_t mask_stride);

}  // namespace lln::cpu
