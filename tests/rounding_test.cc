// Outputs in 16-bit formats round as math/half.h does, bit for bit, in every kernel. Diag with two
// keys of equal score gives the average of two values, which f32 holds exactly; a weight that is a
// power of two moves it to where f16 overflows or has few bits left.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "attention_run.h"
#include "lln/attention.h"
#include "math/half.h"

namespace lln {
namespace {

struct Format {
  DType dtype;
  std::uint16_t infinity;
  float (*decode)(std::uint16_t);
  std::uint16_t (*encode)(float);
};

constexpr Format kFormats[] = {{DType::f16, 0x7C00, f32_from_f16, f16_from_f32},
                               {DType::bf16, 0x7F80, f32_from_bf16, bf16_from_f32}};
constexpr std::int64_t kChannels = 37;  // whole vectors of every target, and a rest

// Two values that meet in one block, and what is expected of their weighted average.
struct Pair {
  std::uint16_t first, second;
  std::uint16_t expected;
};

// Keeps the pair where f32 holds the result, and every product on the way to it, exactly.
void add_pair(const Format& f, std::uint16_t first, std::uint16_t second, double weight,
              std::vector<Pair>& pairs) {
  const double exact = weight * (double{f.decode(first)} + f.decode(second)) / 2;
  const auto rounded = static_cast<float>(exact);
  const auto whole = [](double x) { return static_cast<double>(static_cast<float>(x)) == x; };
  if (rounded == 0 || !whole(exact) || !whole(2 * exact / weight)) return;
  if (!whole(weight * f.decode(first) / 2) || !whole(weight * f.decode(second) / 2)) return;
  pairs.push_back({first, second, f.encode(rounded)});
}

// One block of two tokens for every kChannels pairs.
void expect_rounded(const Format& f, std::vector<Pair> pairs, Kind kind, float weight) {
  ASSERT_GT(pairs.size(), 1000U);
  while (pairs.size() % kChannels != 0) pairs.push_back(pairs.front());
  const auto blocks = static_cast<std::int64_t>(pairs.size()) / kChannels;
  const Shape scores = {1, 1, 2 * blocks, 1}, values = {1, 1, 2 * blocks, kChannels};
  const std::vector<std::uint16_t> zero(static_cast<std::size_t>(2 * blocks));
  std::vector<std::uint16_t> v(2 * pairs.size()), o(v.size());
  const auto place = [](std::size_t i) {  // of the first value; the second is one row below
    return i / kChannels * 2 * kChannels + i % kChannels;
  };
  for (std::size_t i = 0; i < pairs.size(); ++i) {
    v[place(i)] = pairs[i].first;
    v[place(i) + kChannels] = pairs[i].second;
  }
  const float one = 1, none = 0;
  AttentionInputs in;
  in.q = in.k = view(static_cast<const void*>(zero.data()), f.dtype, scores);
  in.v = view(static_cast<const void*>(v.data()), f.dtype, values);
  if (kind == Kind::lln_diag) {
    in.alpha = in.beta = scalar(&one);
    in.lln_weight = scalar(&none);
    in.diag_weight = scalar(&weight);
  }
  const AttentionOutputs out = {.o = view(static_cast<void*>(o.data()), f.dtype, values)};
  const AttentionOptions options{.kind = kind, .diag_block = 2};
  for (const std::string& kernel : test::kernels_for(make_problem(in, out, options))) {
    attention_forward(in, out, options, {.kernel = kernel});
    for (std::size_t i = 0; i < pairs.size(); ++i) {
      for (const std::size_t row : {place(i), place(i) + kChannels}) {
        ASSERT_EQ(o[row], pairs[i].expected) << fmt::format(
            "{}, {}: {} times the average of {:#06x} and {:#06x}", kernel,
            f.dtype == DType::f16 ? "f16" : "bf16", weight, pairs[i].first, pairs[i].second);
      }
    }
  }
}

// The average of two neighbours lies halfway between them: a tie for every pattern, both signs.
TEST(Rounding, TiesGoToEven) {
  for (const Format& f : kFormats) {
    std::vector<Pair> pairs;
    for (std::uint32_t bits = 0; bits + 1 < f.infinity; ++bits) {
      for (const std::uint32_t sign : {0U, 0x8000U}) {
        add_pair(f, static_cast<std::uint16_t>(bits | sign),
                 static_cast<std::uint16_t>((bits + 1) | sign), 1, pairs);
      }
    }
    expect_rounded(f, std::move(pairs), Kind::diag, 1);
  }
}

TEST(Rounding, ValuesOfDifferentSize) {
  for (const Format& f : kFormats) {
    std::mt19937 random(5);
    std::vector<Pair> pairs;
    for (int i = 0; i < 200000; ++i) {
      const auto bits = static_cast<std::uint16_t>(random());
      const auto other = static_cast<std::uint16_t>(bits ^ (random() & 0x8FFFU));
      if ((bits & 0x7FFFU) >= f.infinity || (other & 0x7FFFU) >= f.infinity) continue;
      add_pair(f, bits, other, 1, pairs);
    }
    expect_rounded(f, std::move(pairs), Kind::diag, 1);
  }
}

// In f16 the weights below reach infinity, its border, and all depths of the subnormal numbers.
TEST(Rounding, OverflowAndSubnormals) {
  for (const Format& f : kFormats) {
    for (const float weight : {64.0F, 2.0F, 0x1p-8F, 0x1p-14F, 0x1p-20F}) {
      std::mt19937 random(7);
      std::vector<Pair> pairs;
      while (pairs.size() < 1200) {
        const auto bits = static_cast<std::uint16_t>(random());
        const auto other = static_cast<std::uint16_t>(bits ^ (random() & 0x3FU));
        if ((bits & 0x7FFFU) >= f.infinity || (other & 0x7FFFU) >= f.infinity) continue;
        if (std::abs(f.decode(bits)) > 1e30F) continue;  // f32 itself must hold the result
        add_pair(f, bits, other, weight, pairs);
      }
      expect_rounded(f, std::move(pairs), Kind::lln_diag, weight);
    }
  }
}

// The sum of the largest f16 and a number close to 16, where infinity begins.
TEST(Rounding, TheBorderOfF16) {
  std::vector<Pair> pairs;
  for (std::uint32_t i = 0; i < 1200; ++i) {
    const std::uint32_t sign = i % 2 == 0 ? 0 : 0x8000U;
    const auto largest = static_cast<std::uint16_t>(0x7BFFU | sign);
    const auto near_sixteen = static_cast<std::uint16_t>((0x4BC0U + i / 2 % 128) | sign);
    add_pair(kFormats[0], largest, near_sixteen, 2, pairs);
  }
  expect_rounded(kFormats[0], std::move(pairs), Kind::lln_diag, 2);
}

}  // namespace
}  // namespace lln
