// The sequences of a call whose tensors are in host memory. On a device they are found there.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <vector>

#include "api/kernel.h"

namespace lln {

// Where the rows of each sequence are, which of its keys count, and where its blocks begin; for
// inputs that passed validation.
std::vector<Sequence> make_sequences(const Problem& problem, const AttentionInputs& in);

}  // namespace lln
