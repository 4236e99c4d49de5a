// The 16-bit formats: every bit pattern is decoded as its definition says, and rounding to a format
// takes the nearest value, the even one of two.
// SPDX-License-Identifier: Apache-2.0
#include "math/half.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <limits>

namespace lln {
namespace {

struct Format {
  const char* name;
  int exponent_bits;
  int mantissa_bits;
  float (*decode)(std::uint16_t);
  std::uint16_t (*encode)(float);
};

constexpr Format kFormats[] = {{"f16", 5, 10, f32_from_f16, f16_from_f32},
                               {"bf16", 8, 7, f32_from_bf16, bf16_from_f32}};

class Half : public testing::TestWithParam<Format> {};

// The value of a bit pattern by the definition of the format.
double value_of(const Format& f, std::uint32_t bits) {
  const std::uint32_t mantissa = bits & ((1U << f.mantissa_bits) - 1);
  const int exponent = static_cast<int>(bits >> f.mantissa_bits) & ((1 << f.exponent_bits) - 1);
  const int bias = (1 << (f.exponent_bits - 1)) - 1;
  const double sign = (bits & 0x8000U) != 0 ? -1 : 1;
  if (exponent == (1 << f.exponent_bits) - 1) {
    return mantissa == 0 ? sign * std::numeric_limits<double>::infinity()
                         : std::numeric_limits<double>::quiet_NaN();
  }
  const double fraction = std::ldexp(static_cast<double>(mantissa), -f.mantissa_bits);
  return exponent == 0 ? sign * std::ldexp(fraction, 1 - bias)
                       : sign * std::ldexp(1 + fraction, exponent - bias);
}

TEST_P(Half, DecodesEveryPattern) {
  const Format f = GetParam();
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const double expected = value_of(f, bits);
    const float found = f.decode(static_cast<std::uint16_t>(bits));
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(found)) << bits;
    } else {
      ASSERT_EQ(static_cast<double>(found), expected) << bits;
      ASSERT_EQ(std::signbit(found), (bits & 0x8000U) != 0) << bits;
    }
  }
}

TEST_P(Half, EncodingADecodedValueGivesItsPattern) {
  const Format f = GetParam();
  for (std::uint32_t bits = 0; bits < 0x10000U; ++bits) {
    const float value = f.decode(static_cast<std::uint16_t>(bits));
    const std::uint16_t again = f.encode(value);
    if (std::isnan(value)) {
      ASSERT_TRUE(std::isnan(f.decode(again))) << bits;
      ASSERT_EQ(again & 0x8000U, bits & 0x8000U) << bits;
    } else {
      ASSERT_EQ(again, bits);
    }
  }
}

// Between two neighbours: below the middle down, above it up, the middle itself to the even
// pattern.
TEST_P(Half, RoundsToNearestEven) {
  const Format f = GetParam();
  const std::uint32_t infinity = ((1U << f.exponent_bits) - 1U) << f.mantissa_bits;
  for (std::uint32_t bits = 0; bits + 1 < infinity; ++bits) {
    const auto low = static_cast<std::uint16_t>(bits);
    const auto high = static_cast<std::uint16_t>(bits + 1);
    const auto middle = static_cast<float>((double{f.decode(low)} + f.decode(high)) / 2);
    const std::uint16_t even = bits % 2 == 0 ? low : high;
    ASSERT_EQ(f.encode(middle), even) << bits;
    ASSERT_EQ(f.encode(-middle), even | 0x8000U) << bits;
    ASSERT_EQ(f.encode(std::nextafter(middle, 0.0F)), low) << bits;
    ASSERT_EQ(f.encode(std::nextafter(middle, std::numeric_limits<float>::infinity())), high)
        << bits;
  }
}

TEST_P(Half, LargeValuesBecomeInfinite) {
  const Format f = GetParam();
  const std::uint32_t infinity = ((1U << f.exponent_bits) - 1U) << f.mantissa_bits;
  const auto largest = static_cast<std::uint16_t>(infinity - 1);
  // Half a step above the largest finite value is where rounding reaches infinity.
  const double step = value_of(f, largest) - value_of(f, largest - 1U);
  const double border = value_of(f, largest) + step / 2;
  EXPECT_EQ(f.encode(static_cast<float>(border)), infinity);
  EXPECT_EQ(f.encode(std::nextafter(static_cast<float>(border), 0.0F)), largest);
  EXPECT_EQ(f.encode(-std::numeric_limits<float>::infinity()), infinity | 0x8000U);
  EXPECT_EQ(f.encode(std::numeric_limits<float>::max()), infinity);
}

INSTANTIATE_TEST_SUITE_P(Formats, Half, testing::ValuesIn(kFormats),
                         [](const auto& named) { return std::string(named.param.name); });

}  // namespace
}  // namespace lln
