// Escaping of names.
// SPDX-License-Identifier: Apache-2.0
#include "io/printable.h"

#include <fmt/format.h>

namespace lln::io {

std::string printable(std::string_view name) {
  std::string text = "'";
  for (const char c : name.substr(0, kMaxPrinted)) {
    const auto byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f) {
      text += fmt::format("\\x{:02x}", byte);
    } else {
      text += c;
    }
  }
  return text + (name.size() > kMaxPrinted ? "...'" : "'");
}

}  // namespace lln::io
