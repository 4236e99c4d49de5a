// The checksum of saved decode states. Apart from them, because whoever makes such bytes to try
// what reads them needs it too.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

namespace lln {

// FNV-1a, 64 bits: every step is one to one, so that no change of a single byte goes unseen.
inline std::uint64_t fnv1a(std::span<const std::byte> bytes) noexcept {
  std::uint64_t hash = 0xCBF29CE484222325U;
  for (const std::byte b : bytes) {
    hash = (hash ^ std::to_integer<std::uint64_t>(b)) * 0x100000001B3U;
  }
  return hash;
}

}  // namespace lln
