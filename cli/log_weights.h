// The logarithms of attention weights: v is a piece of the identity, so that the output of the
// library is the attention matrix P itself, a block of columns at a time.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "lln/attention.h"
#include "lln/moments.h"

namespace lln::cli {

class LogWeights {
 public:
  // Memory for so many matrices at once.
  LogWeights(std::int64_t matrices, std::int64_t tokens);

  // Moments of ln P over all entries, one for each sequence of q [sequences, 1, tokens, dim] and k
  // of the same shape; `in` holds no v.
  std::vector<Moments> moments(AttentionInputs in, Kind kind, Parallel& parallel);

 private:
  std::vector<float> identity_;  // [token, key]
  std::vector<float> p_;         // [sequence, 1, token, key]
};

// Moments of each sequence of x [sequences, 1, tokens, dim].
std::vector<Moments> sequence_moments(const ConstView& x, Parallel& parallel);

}  // namespace lln::cli
