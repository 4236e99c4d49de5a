// The border of moment matching: its rules, and which tokens of each sequence count.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "lln/moments.h"

namespace lln {

// Rows of one sequence, trimmed to those from the first that counts to the last.
struct TokenSpan {
  std::int64_t batch = 0;
  std::int64_t begin = 0, end = 0;     // rows of the tensor
  const std::uint8_t* mask = nullptr;  // null: all of them count; otherwise a byte per row from 0
  std::int64_t mask_stride = 0;
};

struct CheckedMatching {
  Problem problem;
  bool self = false;            // which keys count holds for the queries too
  std::vector<TokenSpan> q, k;  // one per sequence; none on a device, which finds them itself
};

// Whether a mode takes moments of the tensors of the very call.
bool reads_sequence(Matching mode) noexcept;

// Each throws one Error that names every fault.
std::vector<TokenSpan> check_moments(const MomentsInputs& in, std::size_t outputs);
CheckedMatching check_matching(const MatchingInputs& in, const MatchingOutputs& out,
                               const MatchingOptions& options);
CheckedMatching check_update(const RunningMoments& running, const MatchingInputs& in);
CheckedMatching check_update(const DeviceRunningMoments& running, const MatchingInputs& in);
// Sizes alone: of sequences, heads and channels.
Problem check_matching(const JoinedMoments& moments, const MatchingOutputs& out,
                       const MatchingOptions& options);
void check_update(const RunningMoments& running, const JoinedMoments& moments);
CheckedMatching check_calibration(const MatchingInputs& in, Matching mode);
// Of the tensors alone.
CheckedMatching check_workspace_inputs(const MatchingInputs& in);

}  // namespace lln
