// Errors of the core on their way to Python. Every exception that leaves an op arrives there as a
// RuntimeError, so the kind of error travels in front of the text, and the package raises the type
// that belongs to it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <stdexcept>
#include <string>

#include "lln/error.h"

namespace lln_torch {

// Translated<&f>::call is f with its errors for Python.
template <auto Function>
struct Translated;

template <class Result, class... Arguments, Result (*Function)(Arguments...)>
struct Translated<Function> {
  static Result call(Arguments... arguments) {
    try {
      return Function(arguments...);
    } catch (const lln::Error& error) {
      throw std::runtime_error("lln " + std::string(lln::to_string(error.code())) + ": " +
                               error.what());
    }
  }
};

}  // namespace lln_torch
