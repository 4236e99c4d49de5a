// Names from files inside messages.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace lln::io {

inline constexpr std::size_t kMaxPrinted = 80;  // characters of a name or number from a file

// A name from a file, made fit for a message: in quotes, control characters escaped, cut when long.
std::string printable(std::string_view name);

}  // namespace lln::io
