// Random numbers that are a hash of their position: they depend neither on the order in which they
// are drawn nor on the machine.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>
#include <cstdint>
#include <numbers>

namespace lln {

inline std::uint64_t mixed_bits(std::uint64_t x) noexcept {  // the finaliser of splitmix64
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

// In (0, 1).
inline double uniform_number(std::uint64_t seed, std::uint64_t index) noexcept {
  const std::uint64_t bits = mixed_bits(mixed_bits(seed) ^ (index * 2 + 1));
  return (static_cast<double>(bits >> 11) + 0.5) * 0x1p-53;
}

// Standard normal.
inline double normal_number(std::uint64_t seed, std::uint64_t index) noexcept {
  const double radius = std::sqrt(-2 * std::log(uniform_number(seed, 2 * index)));
  return radius * std::cos(2 * std::numbers::pi * uniform_number(seed, 2 * index + 1));
}

}  // namespace lln
