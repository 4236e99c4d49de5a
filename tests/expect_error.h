// What a refused call must look like: one Error of this code, with every one of the texts in it; or
// the text alone.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "lln/error.h"

namespace lln::test {

template <class Call>
void expect_error(const Call& call, const std::vector<std::string>& texts,
                  ErrorCode code = ErrorCode::invalid_argument) {
  try {
    call();
    FAIL() << "no error; expected one with: " << texts.front();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    for (const std::string& text : texts) {
      EXPECT_NE(std::string(error.what()).find(text), std::string::npos)
          << "expected: " << text << "\nfound:    " << error.what();
    }
  }
}

// The text of the Error that `call` throws.
template <class Call>
std::string error_of(const Call& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

}  // namespace lln::test
