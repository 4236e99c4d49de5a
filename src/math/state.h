// The state of decoding: how the sums of one key head lie in memory, and how two sets of keys
// become one. Every back end and the merge of whole states share it.
//
// In channel l a set of keys with exponents u_j (units of log2) and values v_j is
//   s = sum_j 2^(u_j - m),   C = sum_j 2^(u_j - m) v_j / s,   c = m + log2(s)
// where m is any reference near the largest u. The pair (m, s) instead of c, because c is a f32
// number that stops growing when a key adds less than its last bit (docs/decoding.md).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "math/host_device.h"

namespace lln {

// Rows of a state are padded to this many floats, a cache line.
inline constexpr std::int64_t kStatePad = 16;
// The reference of the empty set, whose s is 0.
inline constexpr float kNoReference = std::numeric_limits<float>::lowest();

// A set of keys.
struct KeySet {
  float* m;       // [dp]
  float* s;       // [dp]; 0: no key
  float* values;  // [d, dvp]: C
};

// The sums of one sequence and key head are two sets: new tokens join `recent`, and `recent` joins
// `all` about every kRecentTokens tokens. A token's part in a million others is less than the last
// bit of their f32 sums and averages; its part in a few hundred is not, nor is theirs in a million.
struct DecodeSlot {
  KeySet all;
  KeySet recent;
  // The running diagonal block: token t of the sequence in row t mod block. Rows past the last
  // token are left from earlier blocks.
  float* block_k;  // [block, dp]
  float* block_v;  // [block, dvp]
};

inline constexpr std::int64_t kRecentTokens = 256;

// Sizes of a slot, and where it lies.
struct DecodeShape {
  LLN_HOST_DEVICE DecodeShape(std::int64_t dim, std::int64_t dim_v, std::int64_t diag_block)
      : d(dim), dv(dim_v), dp(padded(dim)), dvp(padded(dim_v)), block(diag_block) {}
  std::int64_t d, dv, dp, dvp;
  std::int64_t block;  // 0: no block-diagonal part

  LLN_HOST_DEVICE std::int64_t set_floats() const noexcept { return 2 * dp + d * dvp; }
  LLN_HOST_DEVICE std::int64_t floats() const noexcept {
    return 2 * set_floats() + block * (dp + dvp);
  }
  LLN_HOST_DEVICE DecodeSlot slot(float* memory, std::int64_t index) const noexcept {
    float* const all = memory + index * floats();
    float* const recent = all + set_floats();
    float* const block_k = recent + set_floats();
    return {set_at(all), set_at(recent), block_k, block_k + block * dp};
  }
  // Keys of the running block when a sequence has seen so many tokens.
  LLN_HOST_DEVICE std::int64_t block_tokens(std::int64_t tokens) const noexcept {
    return tokens == 0 || block == 0 ? 0 : (tokens - 1) % block + 1;
  }

 private:
  LLN_HOST_DEVICE KeySet set_at(float* m) const noexcept { return {m, m + dp, m + 2 * dp}; }
  LLN_HOST_DEVICE static std::int64_t padded(std::int64_t n) noexcept {
    return (n + kStatePad - 1) / kStatePad * kStatePad;
  }
};

inline void clear(const DecodeShape& shape, const KeySet& set) noexcept {
  std::fill(set.m, set.m + shape.dp, kNoReference);
  std::fill(set.s, set.s + shape.dp, 0.0F);
  std::fill(set.values, set.values + shape.d * shape.dvp, 0.0F);
}

inline void clear(const DecodeShape& shape, const DecodeSlot& slot) noexcept {
  clear(shape, slot.all);
  clear(shape, slot.recent);
  std::fill(slot.block_k, slot.block_k + shape.block * (shape.dp + shape.dvp), 0.0F);
}

// The mass of the union of two sets in one channel, and the share of each: the joined average is
// C = first * C_1 + second * C_2, with first + second = 1.
struct JoinedMass {
  float m;
  float s;
  float first;
  float second;
};

// With m the larger of both references,
//   s = s_1 2^(m_1 - m) + s_2 2^(m_2 - m),   first = s_1 2^(m_1 - m) / s.
// In f64, or in f32 where kernels on a device join sets on their way.
template <class Real = double>
LLN_HOST_DEVICE inline JoinedMass join_mass(float m1, float s1, float m2, float s2) noexcept {
  const float m = m1 < m2 ? m2 : m1;
  const Real first = s1 == 0 ? 0 : s1 * std::exp2(static_cast<Real>(m1) - m);
  const Real second = s2 == 0 ? 0 : s2 * std::exp2(static_cast<Real>(m2) - m);
  const Real total = first + second;
  if (total == 0) return {kNoReference, 0, 0, 0};
  return {m, static_cast<float>(total), static_cast<float>(first / total),
          static_cast<float>(second / total)};
}

// `into` becomes the union with `other`. Associative and commutative, up to rounding.
inline void merge(const DecodeShape& shape, const KeySet& into, const KeySet& other) noexcept {
  for (std::int64_t l = 0; l < shape.d; ++l) {
    const JoinedMass joined = join_mass(into.m[l], into.s[l], other.m[l], other.s[l]);
    into.m[l] = joined.m;
    into.s[l] = joined.s;
    float* const row = into.values + l * shape.dvp;
    const float* const added = other.values + l * shape.dvp;
    for (std::int64_t c = 0; c < shape.dvp; ++c) {
      row[c] = joined.first * row[c] + joined.second * added[c];
    }
  }
}

// Empties `recent` into `all`.
inline void fold(const DecodeShape& shape, const DecodeSlot& slot) noexcept {
  merge(shape, slot.all, slot.recent);
  clear(shape, slot.recent);
}

}  // namespace lln
