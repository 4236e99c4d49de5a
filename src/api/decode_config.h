// What the parts of a decode state share: the rules of a configuration and its text.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "lln/decode.h"
#include "math/state.h"

namespace lln {

// Throws one Error that names every fault; `call` begins its text.
void check_config(const char* call, const DecodeConfig& config);

// For errors: b1h12k12d64v64:lln+diag64, then what the text of a problem has no place for.
std::string describe(const DecodeConfig& config);

// Of a configuration that has been checked.
DecodeShape decode_shape(const DecodeConfig& config) noexcept;
std::int64_t slot_count(const DecodeConfig& config) noexcept;

}  // namespace lln
