// How decoding is cut into work: which tokens of an append are taken one by one, and when a step is
// shared among threads. It depends on the sequence alone, never on its neighbours or on threads.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cpu/layout.h"

namespace lln::cpu {

// Fewer tokens than this are added one by one. 12 heads of 64 channels, one core of a Xeon at 2.8
// GHz with AVX-512, 2026: 8 tokens take 0.16 ms one by one and 0.11 ms as a chunk, 6 as long.
inline constexpr std::int64_t kLeastWalk = 8;
// Floats of state that a step must pass over before handing work to other threads pays.
inline constexpr std::int64_t kStepFloatsToShare = std::int64_t{1} << 18;

// How many of `count` new tokens are added one by one: those up to the border of the diagonal
// block, and all where what remains is short.
inline std::int64_t single_tokens(const Problem& p, std::int64_t before, std::int64_t count) {
  const std::int64_t block = p.has_diag() ? p.diag_block : 1;
  const std::int64_t to_border = (block - before % block) % block;
  return count - to_border < kLeastWalk ? count : to_border;
}

// The problem that the causal forward walks for an append.
inline Problem append_walk(Problem p) {
  p.causal = true;
  p.tokens = p.tokens_k;
  return p;
}

struct StepLayout {
  StepLayout(Arena& arena, const Problem& p, const Dims& dims, int workers) {
    arena.fill(tiles, workers, p, dims);
  }
  std::vector<DecodeTiles> tiles;  // one per worker
};

}  // namespace lln::cpu
