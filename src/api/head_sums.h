// Sums over the tokens that count: the moments of each head, and of each pair of a key head and the
// query heads that share it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <vector>

#include "api/moments_check.h"

namespace lln {

// out[s * heads + h] for all spans and heads of a tensor in host memory.
void sum_heads(const ConstView& x, std::span<const TokenSpan> spans, std::span<Moments> out,
               Parallel* parallel);

// Moments of q and k for every (sequence, key head).
struct HeadPairs {
  std::vector<Moments> q, k;
};

// Throws where a token that counts holds an infinity or NaN. Waits where the tensors are on a
// device.
HeadPairs sum_pairs(const char* call, const MatchingInputs& in, const CheckedMatching& checked,
                    const Exec& exec);

// From the moments of each head, in the order of JoinedMoments; throws as sum_pairs does.
HeadPairs pair_heads(const char* call, std::span<const Moments> q, std::span<const Moments> k,
                     std::int64_t heads, std::int64_t heads_k);

}  // namespace lln
