// Random damage to the bytes of a file, for tests that a reader survives it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <random>
#include <string>
#include <vector>

namespace lln::io {

// One to four changes: bytes replaced, cut off, erased, digits changed, the first eight bytes
// (where lengths are) hit, and pieces inserted that mean something in the format.
inline std::string damaged(std::string bytes, const std::vector<std::string>& pieces,
                           std::mt19937& random) {
  const auto below = [&](std::size_t n) {
    return std::uniform_int_distribution<std::size_t>(0, n - 1)(random);
  };
  const std::size_t changes = 1 + below(4);
  for (std::size_t i = 0; i < changes && !bytes.empty(); ++i) {
    const std::size_t at = below(bytes.size());
    switch (below(6)) {
      case 0:
        bytes[at] = static_cast<char>(below(256));
        break;
      case 1:
        bytes.resize(at);
        break;
      case 2:
        bytes.insert(at, pieces[below(pieces.size())]);
        break;
      case 3:
        bytes.erase(at, 1 + below(8));
        break;
      case 4: {
        const std::size_t digit = bytes.find_first_of("0123456789", at);
        if (digit != std::string::npos) bytes[digit] = static_cast<char>('0' + below(10));
        break;
      }
      default:
        bytes[below(std::min<std::size_t>(8, bytes.size()))] = static_cast<char>(below(256));
    }
  }
  return bytes;
}

}  // namespace lln::io
