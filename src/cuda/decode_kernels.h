// What the files of the decode kernels ask of each other.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "api/kernel.h"

namespace lln::cuda {

// Why decoding does not take a problem of a device; empty when it does.
std::string decode_refusal(const Problem& problem);

// Sequences that add at most `most` tokens get them one by one; the others are left as they are.
void append_few(const Call& call, std::int64_t most);

}  // namespace lln::cuda
