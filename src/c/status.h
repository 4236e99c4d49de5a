// The error text of each thread, and the status that stands for it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lln/c.h"
#include "lln/error.h"

namespace lln::c {

// Keeps "CALL: text", or the text alone where `call` is empty, for lln_last_error().
lln_status fail(ErrorCode code, const char* call, const char* text) noexcept;

}  // namespace lln::c
