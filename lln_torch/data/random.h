// Random numbers of data: functions of a seed, a stream, an item and the number of the draw, so
// that any example can be made without those before it, on any machine. The generator is Philox
// 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011); shuffles are a
// keyed permutation that needs no memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <numbers>

namespace lln_torch {

// The 128 bits that Philox makes of a counter under a key.
inline std::array<std::uint32_t, 4> philox(std::array<std::uint32_t, 4> counter,
                                           std::array<std::uint32_t, 2> key) {
  for (int round = 0; round < 10; ++round) {
    const std::uint64_t low = std::uint64_t{0xD2511F53} * counter[0];
    const std::uint64_t high = std::uint64_t{0xCD9E8D57} * counter[2];
    counter = {static_cast<std::uint32_t>(high >> 32) ^ counter[1] ^ key[0],
               static_cast<std::uint32_t>(high),
               static_cast<std::uint32_t>(low >> 32) ^ counter[3] ^ key[1],
               static_cast<std::uint32_t>(low)};
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return counter;
}

// The draws of one item (an example, a row of a batch) for one purpose. Streams are numbers that
// the parts of the code choose for themselves, one for each purpose: see Stream.
class Random {
 public:
  Random(std::uint64_t seed, std::uint64_t stream, std::uint64_t item)
      : key_(seed + stream * 0x9E3779B97F4A7C15u), item_(item) {}

  std::uint64_t bits() {
    if (draw_ % 2 == 0) {
      const std::uint64_t block = draw_ / 2;
      const std::array<std::uint32_t, 4> words =
          philox({low(block), upper(block), low(item_), upper(item_)}, {low(key_), upper(key_)});
      first_ = std::uint64_t{words[1]} << 32 | words[0];
      second_ = std::uint64_t{words[3]} << 32 | words[2];
    }
    return draw_++ % 2 == 0 ? first_ : second_;
  }

  // One of 0 .. n - 1, n >= 1, each as likely as the others.
  std::uint64_t below(std::uint64_t n) {
    const std::uint64_t uneven = (0 - n) % n;  // 2^64 mod n: so many numbers are too many
    while (true) {
      const std::uint64_t x = bits();
      if (x >= uneven) return x % n;
    }
  }
  std::int64_t below(std::int64_t n) {
    return static_cast<std::int64_t>(below(static_cast<std::uint64_t>(n)));
  }
  // One of least .. most.
  std::int64_t between(std::int64_t least, std::int64_t most) {
    return least + below(most - least + 1);
  }

  double uniform() { return static_cast<double>(bits() >> 11) * 0x1p-53; }  // [0, 1)
  double uniform(double least, double most) { return least + (most - least) * uniform(); }
  bool chance(double probability) { return uniform() < probability; }
  // By log and cos of the C library: the only draw whose last bit may differ between systems.
  double normal() {
    const double radius = std::sqrt(-2 * std::log(1 - uniform()));
    return radius * std::cos(2 * std::numbers::pi * uniform());
  }

 private:
  static std::uint32_t low(std::uint64_t x) { return static_cast<std::uint32_t>(x); }
  static std::uint32_t upper(std::uint64_t x) { return static_cast<std::uint32_t>(x >> 32); }

  std::uint64_t key_;
  std::uint64_t item_;
  std::uint64_t draw_ = 0;
  std::uint64_t first_ = 0;
  std::uint64_t second_ = 0;
};

// A stream by its name, so that two purposes never share one by accident: Stream("mlm crop").
class Stream {
 public:
  template <std::size_t kSize>
  constexpr Stream(const char (&name)[kSize]) {  // NOLINT: meant to convert
    for (std::size_t i = 0; i + 1 < kSize; ++i) {
      value_ = (value_ ^ static_cast<unsigned char>(name[i])) * 0x100000001B3u;  // FNV-1a
    }
  }
  constexpr operator std::uint64_t() const { return value_; }  // NOLINT: meant to convert

 private:
  std::uint64_t value_ = 0xCBF29CE484222325u;
};

// The first draw: what a seed, a stream and an index alone decide.
inline std::uint64_t random_bits(std::uint64_t seed, std::uint64_t stream, std::uint64_t index) {
  return Random(seed, stream, index).bits();
}

// An order of 0 .. size - 1 of its own for every seed and epoch, without memory: a Feistel network
// over the next power of four, walked until the number is in range.
class Permutation {
 public:
  Permutation(std::uint64_t seed, std::uint64_t epoch, std::int64_t size)
      : size_(static_cast<std::uint64_t>(size)) {
    while (half_bits_ < 32 && (std::uint64_t{1} << (2 * half_bits_)) < size_) ++half_bits_;
    Random random(seed, Stream("permutation"), epoch);
    for (std::uint64_t& key : keys_) key = random.bits();
  }

  // The example at `position` of the epoch.
  std::int64_t operator[](std::int64_t position) const {
    auto x = static_cast<std::uint64_t>(position);
    do {
      x = permute(x);
    } while (x >= size_);
    return static_cast<std::int64_t>(x);
  }

 private:
  std::uint64_t permute(std::uint64_t x) const {
    const std::uint64_t half = (std::uint64_t{1} << half_bits_) - 1;
    std::uint64_t left = x >> half_bits_;
    std::uint64_t right = x & half;
    for (const std::uint64_t key : keys_) {
      std::uint64_t mixed = (right ^ key) * 0xBF58476D1CE4E5B9u;
      mixed = (mixed ^ mixed >> 31) * 0x94D049BB133111EBu;
      mixed ^= mixed >> 29;
      const std::uint64_t next = left ^ (mixed & half);
      left = right;
      right = next;
    }
    return left << half_bits_ | right;
  }

  std::uint64_t size_;
  int half_bits_ = 4;  // at least 256 numbers: a smaller network knows too few orders
  std::array<std::uint64_t, 8> keys_{};
};

inline Permutation permutation(std::uint64_t seed, std::uint64_t epoch, std::int64_t size) {
  return {seed, epoch, size};
}

}  // namespace lln_torch
