// Running out of memory for the small tables of a call is an Error like every other.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <new>
#include <string>

#include "lln/error.h"

namespace lln {

template <class F>
auto memory_errors(const char* verb, F&& f) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    throw Error(ErrorCode::out_of_memory,
                std::string(verb) + ": no memory for the tables of the call");
  }
}

}  // namespace lln
