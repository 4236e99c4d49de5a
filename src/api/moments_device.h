// The part of moments.cc for tensors on a device.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>

#include "api/moments_check.h"

namespace lln {

MatchingReport match_on_device(const CheckedMatching& checked, const MatchingInputs& in,
                               const MatchingOutputs& out, const MatchingOptions& options,
                               const Exec& exec);
// Of inputs that have been checked; waits.
void sum_heads_on_device(const MomentsInputs& in, std::span<Moments> out, const Exec& exec);

}  // namespace lln
