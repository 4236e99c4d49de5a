// What the files of the decode kernels ask of each other.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

#include "api/kernel.h"

namespace lln::cuda {

// Why decoding does not take a problem of a device; empty when it does.
std::string decode_refusal(const Problem& problem);

// Sequences that add at most `most` tokens get them one by one; the others are left as they are.
void append_few(const Call& call, std::int64_t most);

// Which tokens of an append: all, or where the causal walks take those from a border of diagonal
// blocks on, the ones before it; and the rest, where the walks have not taken them.
enum class AppendPart : std::uint8_t { all, lead, rest };

// An append in parts. The sums and the rows of sequences that add more than a few tokens, for slots
// that are flagged ([1 + slots]: whether any is, and which; null: for all), with append_bytes() of
// workspace;
void append_many(const Call& call, AppendPart part = AppendPart::all,
                 const std::uint32_t* flags = nullptr);
// then all of those that add few, and the running blocks and the counts of the others.
void append_end(const Call& call);
std::size_t append_bytes(const Problem& problem);
std::string append_refusal(const Problem& problem);

}  // namespace lln::cuda
