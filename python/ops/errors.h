// Errors of the core on their way to Python. Every exception that leaves an op arrives there as a
// RuntimeError, so the kind of error travels in front of the text, and the package raises the type
// that belongs to it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>
#include <string>
#include <utility>

#include "lln/error.h"

namespace lln_torch {

template <class Work>
decltype(auto) translate_errors(Work&& work) {
  try {
    return std::forward<Work>(work)();
  } catch (const lln::Error& error) {
    throw std::runtime_error("lln " + std::string(lln::to_string(error.code())) + ": " +
                             error.what());
  }
}

}  // namespace lln_torch
