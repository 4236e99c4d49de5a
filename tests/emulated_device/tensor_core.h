// Sums of products as tensor cores make them: not those of f32, which products that need f32
// accuracy (src/cuda/split_mma.cuh) must be tried with.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

namespace emulated {

inline constexpr unsigned kProductDepth = 16, kProductColumns = 8;

// sums += a b, for 8 columns. Products are exact; eight of them and the sum so far are cut off at
// one bit behind the last one of the largest, towards zero, added as integers, and cut off again to
// the 24 bits of f32. That is what has been found out about compute capability 8.0; 9.0 takes 16
// products at once and keeps one more bit.
inline void add_products(float (&sums)[kProductColumns], const float (&a)[kProductDepth],
                         const float (&b)[kProductDepth][kProductColumns]) {
  constexpr unsigned kAtOnce = 8;
  constexpr std::uint32_t kBits = 24, kExponentBias = 127, kLargestExponent = 254;
  for (unsigned first = 0; first < kProductDepth; first += kAtOnce) {
    float products[kAtOnce][kProductColumns], largest[kProductColumns], plain[kProductColumns];
    for (unsigned j = 0; j < kProductColumns; ++j) {
      plain[j] = sums[j];
      largest[j] = std::fabs(sums[j]);
    }
    for (unsigned k = 0; k < kAtOnce; ++k) {
      for (unsigned j = 0; j < kProductColumns; ++j) {
        products[k][j] = a[first + k] * b[first + k][j];
        plain[j] += products[k][j];
        largest[j] = std::max(largest[j], std::fabs(products[k][j]));
      }
    }
    float per_unit[kProductColumns], unit[kProductColumns];
    std::int32_t total[kProductColumns];
    for (unsigned j = 0; j < kProductColumns; ++j) {
      const std::uint32_t exponent =
          std::clamp(std::bit_cast<std::uint32_t>(largest[j]) >> 23, kBits + 1, kLargestExponent);
      per_unit[j] = std::bit_cast<float>((2 * kExponentBias + kBits - exponent) << 23);
      unit[j] = std::bit_cast<float>((exponent - kBits) << 23);
      // Comparisons that do not hold for NaN; what is not finite goes the way of f32, below.
      const bool whole = std::fabs(plain[j]) < INFINITY && largest[j] < INFINITY;
      total[j] = whole ? static_cast<std::int32_t>(sums[j] * per_unit[j]) : 0;
      per_unit[j] = whole ? per_unit[j] : 0;
    }
    for (unsigned k = 0; k < kAtOnce; ++k) {
      for (unsigned j = 0; j < kProductColumns; ++j) {
        const float units = per_unit[j] > 0 ? products[k][j] * per_unit[j] : 0;
        total[j] += static_cast<std::int32_t>(units);
      }
    }
    for (unsigned j = 0; j < kProductColumns; ++j) {
      // A double holds the total; without its last 29 bits it is an f32 number.
      const auto bits = std::bit_cast<std::uint64_t>(static_cast<double>(total[j]));
      const auto cut = std::bit_cast<double>(bits & ~((std::uint64_t{1} << 29) - 1));
      sums[j] = per_unit[j] > 0 ? static_cast<float>(cut) * unit[j] : plain[j];
    }
  }
}

}  // namespace emulated
