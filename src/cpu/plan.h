// How the CPU kernels cut a problem into work: chunks of tokens that fit the first-level cache,
// segments of chunks that one task handles, and the scratch memory for both. Nothing here depends
// on the number of threads except how much scratch there is, so that results cannot depend on it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "api/kernel.h"

namespace lln::cpu {

// Rows of scratch tiles are padded to this many floats: the widest vector, so that no loop has a
// tail.
inline constexpr std::int64_t kPad = 16;
// Channels of a head, at most (the border refuses more).
inline constexpr std::int64_t kMaxDim = 256;
// Tokens worked on at once. 64 rows of 64 channels are 16 KiB: keys, values and the state of a head
// of dimension 64 stay in a 48 KiB first-level cache.
inline constexpr std::int64_t kChunk = 64;
// Largest chunk; also the largest diagonal block whose scores are held at once.
inline constexpr std::int64_t kMaxChunk = 128;
// Bidirectional: a task handles at least this many tokens; a long sequence has 16 tasks or more for
// each head, in tasks of up to kLongSegmentTokens (the start of a task waits for memory), and at
// most kMaxSegments, so that partial states take no memory that grows with the sequence.
inline constexpr std::int64_t kSegmentTokens = 512;
inline constexpr std::int64_t kLongSegmentTokens = 2048;
inline constexpr std::int64_t kMaxSegments = 64;
// Causal: tokens between two stored states.
inline constexpr std::int64_t kCausalSegmentTokens = 1024;
// Halving a chunk of kMaxChunk down to single rows.
inline constexpr int kMaxHalvings = 7;

inline std::int64_t padded(std::int64_t n) { return (n + kPad - 1) / kPad * kPad; }
inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

struct Range {
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t size() const { return end - begin; }
};

// A range cut at every multiple of `step` counted from `origin` (which may lie inside the range).
class Grid {
 public:
  Grid() = default;
  Grid(Range range, std::int64_t origin, std::int64_t step)
      : range_(range), step_(step), first_cut_(range.begin + positive_mod(origin - range.begin)) {
    if (first_cut_ == range.begin) first_cut_ += step;
  }
  std::int64_t count() const {
    if (range_.size() <= 0) return 0;
    return first_cut_ >= range_.end ? 1 : 1 + ceil_div(range_.end - first_cut_, step_);
  }
  Range operator[](std::int64_t i) const {
    return {i == 0 ? range_.begin : first_cut_ + (i - 1) * step_,
            std::min(range_.end, first_cut_ + i * step_)};
  }

 private:
  std::int64_t positive_mod(std::int64_t x) const { return ((x % step_) + step_) % step_; }

  Range range_;
  std::int64_t step_ = 1;
  std::int64_t first_cut_ = 0;
};

// Tokens in a chunk: whole diagonal blocks where they fit, so that a block's scores are computed
// once. Softmax has nothing but scores, and large tiles load and transpose a key less often.
inline std::int64_t chunk_tokens(const Problem& p) {
  if (p.kind == Kind::softmax) return kMaxChunk;
  if (!p.has_diag() || p.diag_block > kMaxChunk) return kChunk;
  return p.diag_block > kChunk ? p.diag_block : kChunk / p.diag_block * p.diag_block;
}

// Length of a bidirectional segment of `tokens`: a multiple of the chunk that depends on the
// sequence alone.
inline std::int64_t segment_tokens(std::int64_t tokens, std::int64_t chunk) {
  const std::int64_t usual = std::clamp(tokens / 16, kSegmentTokens, kLongSegmentTokens);
  return ceil_div(std::max(usual, ceil_div(tokens, kMaxSegments)), chunk) * chunk;
}

// More segments than any sequence of `tokens` has (one more than the cuts between them).
inline std::int64_t max_segments(std::int64_t tokens) {
  return std::min(ceil_div(tokens, kSegmentTokens), kMaxSegments) + 1;
}

inline std::int64_t causal_segment_tokens(std::int64_t chunk) {
  return ceil_div(kCausalSegmentTokens, chunk) * chunk;
}

// Whether the first segment of a sequence may be short. Segments are counted from where blocks are:
// from the first valid key, before which there are rows to walk where a state is given, or from an
// origin anywhere.
inline bool begins_short(const Problem& p) { return p.block_origins || (p.state && p.masked); }

// At least as many as one sequence of `tokens` has.
inline std::int64_t longest_causal_segments(const Problem& p) {
  return ceil_div(p.tokens, kCausalSegmentTokens) + (begins_short(p) ? 1 : 0);
}

// The same for all sequences of a problem together, for one key head.
inline std::int64_t max_causal_segments(const Problem& p) {
  return p.packed
             ? ceil_div(p.tokens, kCausalSegmentTokens) + p.sequences * (begins_short(p) ? 2 : 1)
             : p.sequences * longest_causal_segments(p);
}

// Hands out pieces of the workspace, 64 bytes aligned. Without memory it only counts, so that one
// layout function gives both the size and the pointers.
class Arena {
 public:
  explicit Arena(std::byte* memory) : memory_(memory) {
    const auto address = reinterpret_cast<std::uintptr_t>(memory);
    used_ = memory == nullptr ? kAlign : (kAlign - address % kAlign) % kAlign;
  }
  template <class T>
  T* take(std::int64_t count) {
    T* const piece = memory_ == nullptr ? nullptr : reinterpret_cast<T*>(memory_ + used_);
    used_ += ceil_div(count * static_cast<std::int64_t>(sizeof(T)), kAlign) * kAlign;
    return piece;
  }
  float* floats(std::int64_t count) { return take<float>(count); }
  // `count` objects that take their memory from here; when only counting, one stands for all.
  template <class T, class... Args>
  void fill(std::vector<T>& list, std::int64_t count, const Args&... args) {
    if (memory_ == nullptr) {
      const std::int64_t before = used_;
      const T one(*this, args...);
      used_ = before + (used_ - before) * count;
      return;
    }
    list.reserve(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i) list.emplace_back(*this, args...);
  }
  std::size_t used() const { return static_cast<std::size_t>(used_); }

 private:
  static constexpr std::int64_t kAlign = 64;
  std::byte* memory_;
  std::int64_t used_;
};

// Sizes that every kernel needs, by the letters of docs/theory.md.
struct Dims {
  explicit Dims(const Problem& p)
      : d(p.dim),
        dv(p.dim_v),
        dp(padded(p.dim)),
        dvp(padded(p.dim_v)),
        group(p.heads / p.heads_k),
        chunk(chunk_tokens(p)) {}
  std::int64_t d, dv, dp, dvp;
  std::int64_t group;  // query heads that share a key head
  std::int64_t chunk;
  std::int64_t state() const { return dp * dvp; }
};

// Scratch of one worker for the block-diagonal part or softmax: a tile of rows against a tile of
// keys, both of at most dims.chunk tokens.
struct ScoreTiles {
  ScoreTiles(Arena& arena, const Dims& dims, bool backward);
  float* q;           // [rows, dp], scaled by log2(e) / sqrt(d)
  float* k;           // [keys, dp]
  float* kt;          // [dp, keys]
  float* v;           // [keys, dvp]
  float* scores;      // [rows, keys]
  float* row_max;     // [rows], later log2 of the row's sum
  float* row_sum;     // [rows]
  std::int64_t* key;  // [keys] token of each column
  // Backward only.
  float* vt = nullptr;         // [dvp, keys]
  float* g = nullptr;          // [rows, dvp]
  float* dscores = nullptr;    // [rows, keys]
  float* row_delta = nullptr;  // [rows]
};

// Sums over the keys of a segment: in channel l they are scaled by 2^-m_l.
struct KeySums {
  KeySums() = default;
  KeySums(Arena& arena, const Dims& dims)
      : m(arena.floats(dims.dp)),
        s(arena.floats(dims.dp)),
        a(arena.floats(dims.state())),
        value_scale(arena.floats(1)) {}
  float* m = nullptr;            // [dp] reference exponent
  float* s = nullptr;            // [dp] sum of weights
  float* a = nullptr;            // [dp, dvp] sum of weights times values
  float* value_scale = nullptr;  // what the values in `a` were multiplied with
};

// The state of a set of keys: c = log2 of the sum of features (natural in the API), C the values
// averaged with them. The empty set is c = -inf, C = 0. Padding channels have c = -inf.
struct State {
  State() = default;
  State(Arena& arena, const Dims& dims)
      : c(arena.floats(dims.dp)), values(arena.floats(dims.state())) {}
  float* c = nullptr;       // [dp]
  float* values = nullptr;  // [dp, dvp]
};

// One head of one sequence with the segments of its keys and of its rows.
struct HeadWork {
  std::int64_t sequence = 0;
  std::int64_t head_k = 0;
  Grid keys;
  Grid rows;
  std::int64_t first_key_slot = 0;  // of the wave's slots for segments
  std::int64_t first_row_slot = 0;
};

// Heads are taken in waves of at most this many, so that the memory for their states depends on
// the number of workers and not on the number of heads.
inline std::int64_t wave_heads(int workers) { return 8 * static_cast<std::int64_t>(workers); }
inline std::int64_t wave_slots(std::int64_t tokens, int workers) {
  return max_segments(tokens) + wave_heads(workers);
}

}  // namespace lln::cpu
