// Status codes and the error text of each thread.
// SPDX-License-Identifier: Apache-2.0
#include "c/status.h"

#include <string>

#include "lln/version.h"

namespace lln::c {
namespace {

// What lln_last_error() returns where even the text of an error finds no memory.
constexpr const char* kNoMemory = "no memory for the text of the error";

struct LastError {
  std::string text;
  bool lost = false;  // there was no memory to keep it
};

LastError& last_error() noexcept {
  thread_local LastError last;
  return last;
}

lln_status status_of(ErrorCode code) noexcept {
  switch (code) {
    case ErrorCode::invalid_argument:
      return LLN_ERROR_INVALID_ARGUMENT;
    case ErrorCode::unsupported:
      return LLN_ERROR_UNSUPPORTED;
    case ErrorCode::out_of_memory:
      return LLN_ERROR_OUT_OF_MEMORY;
    case ErrorCode::device:
      return LLN_ERROR_DEVICE;
    case ErrorCode::io:
      return LLN_ERROR_IO;
    case ErrorCode::internal:
      return LLN_ERROR_INTERNAL;
  }
  return LLN_ERROR_INTERNAL;
}

}  // namespace

lln_status fail(ErrorCode code, const char* call, const char* text) noexcept {
  LastError& last = last_error();
  try {
    last.text = call;
    if (!last.text.empty()) last.text += ": ";
    last.text += text;
    last.lost = false;
  } catch (...) {
    last.lost = true;
  }
  return status_of(code);
}

}  // namespace lln::c

const char* lln_version(void) { return LLN_VERSION; }

const char* lln_last_error(void) {
  const auto& last = lln::c::last_error();
  return last.lost ? lln::c::kNoMemory : last.text.c_str();
}

const char* lln_status_name(lln_status status) {
  if (status == LLN_OK) return "ok";
  for (const lln::ErrorCode code : {lln::ErrorCode::invalid_argument, lln::ErrorCode::unsupported,
                                    lln::ErrorCode::out_of_memory, lln::ErrorCode::device,
                                    lln::ErrorCode::io, lln::ErrorCode::internal}) {
    if (lln::c::status_of(code) == status) return lln::to_string(code);
  }
  return "?";
}
