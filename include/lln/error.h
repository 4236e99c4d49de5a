// The one exception type of the library. Everything that can go wrong at the border of the API
// arrives as an lln::Error whose text names what was expected and what was found.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>
#include <string>

namespace lln {

enum class ErrorCode {
  invalid_argument,  // the request contradicts itself or the data it points to
  unsupported,       // a legal request that no kernel of this build takes
  out_of_memory,     // a workspace could not be allocated
  device,            // the device is missing or reported a failure
  io,                // a file could not be read or written
  internal,          // a bug in this library
};

const char* to_string(ErrorCode code) noexcept;

class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& text) : std::runtime_error(text), code_(code) {}
  ErrorCode code() const noexcept { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace lln
