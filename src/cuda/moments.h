// Moments and matching on a device, in the order of a stream and without a look at any number from
// the host. No header of CUDA is included here, so that src/api can ask for it in every build.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>

#include "lln/moments.h"
#include "math/matching_rule.h"

namespace lln::cuda {

// What is matched, checked by src/api. Views that a call has no use for are not given.
struct MatchingCall {
  Problem problem;  // of q and k; op and kind play no part
  MatchingInputs in;
  bool self = false;               // which keys count holds for the queries too
  std::byte* workspace = nullptr;  // matching_workspace(problem), aligned to 256 bytes
  void* stream = nullptr;
};

// Of the calls below that take moments: none and frozen scales and running ones need none.
std::size_t matching_workspace(const Problem& problem);

// alpha and beta of every sequence and head; NaN where a token that counts holds an infinity or
// NaN, in its sequence and key head alone, with mode paper in all.
void match_none(const MatchingCall& call, const MatchingOutputs& out);
void match_frozen(const MatchingCall& call, const MatchingOutputs& out);
void match_per_head(const MatchingCall& call, const MatchingOutputs& out, const MatchingRule& rule);
void match_paper(const MatchingCall& call, const MatchingOutputs& out, const MatchingRule& rule);
void match_running(const MatchingCall& call, const MatchingOutputs& out, const MatchingRule& rule,
                   const DeviceRunningMoments& running);
void update_running(const MatchingCall& call, const DeviceRunningMoments& running);

// Moments of every (sequence, head) of the keys; waits for them.
void sum_heads(const MatchingCall& call, std::span<Moments> out);

}  // namespace lln::cuda
