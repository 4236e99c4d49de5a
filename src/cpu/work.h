// How heads become tasks: the segments of each head, and waves of heads that share the slots for
// partial results. Target-independent.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <limits>
#include <vector>

#include "cpu/plan.h"

namespace lln::cpu {

// Heads that are worked on together, and how many segments they have.
struct Wave {
  std::vector<HeadWork> heads;
  std::int64_t key_slots = 0;
  std::int64_t row_slots = 0;
};

inline constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

struct SegmentTask {
  std::int64_t head;     // of the wave
  std::int64_t segment;  // of the head's keys or rows
};

// Segments, like chunks, begin where diagonal blocks do, so that none of these is in two.
inline HeadWork bidirectional_work(const Call& call, const Dims& dims, std::int64_t pair) {
  const Problem& p = call.problem;
  HeadWork work;
  work.sequence = pair / p.heads_k;
  work.head_k = pair % p.heads_k;
  const Sequence& seq = call.sequences[static_cast<std::size_t>(work.sequence)];
  const Range keys{seq.key_first, seq.key_end};
  work.keys = Grid(keys, seq.block_origin, segment_tokens(keys.size(), dims.chunk));
  // Softmax rows cost as much as there are keys: small tasks balance better.
  const std::int64_t step =
      p.kind == Kind::softmax ? dims.chunk : segment_tokens(seq.q_tokens, dims.chunk);
  work.rows = Grid({0, seq.q_tokens}, seq.block_origin, step);
  return work;
}

// The causal kernels walk rows and keys together, from the first valid key on, or from the first
// row where rows before that key see those of a given state.
inline HeadWork causal_work(const Call& call, const Dims& dims, std::int64_t pair) {
  HeadWork work;
  work.sequence = pair / call.problem.heads_k;
  work.head_k = pair % call.problem.heads_k;
  const Sequence& seq = call.sequences[static_cast<std::size_t>(work.sequence)];
  const std::int64_t first = call.in.state.given() ? 0 : seq.key_first;
  work.rows = Grid({first, seq.q_tokens}, seq.block_origin, causal_segment_tokens(dims.chunk));
  return work;
}

// Takes heads from `next` on until the wave is full: at most `max_heads` heads, and no more
// segments than there are slots (one head always fits).
template <class MakeWork>
Wave take_wave(std::int64_t& next, std::int64_t pairs, std::int64_t max_heads,
               std::int64_t max_key_slots, std::int64_t max_row_slots, MakeWork&& make_work) {
  Wave wave;
  while (next < pairs && static_cast<std::int64_t>(wave.heads.size()) < max_heads) {
    HeadWork work = make_work(next);
    const std::int64_t keys = wave.key_slots + work.keys.count();
    const std::int64_t rows = wave.row_slots + work.rows.count();
    if (!wave.heads.empty() && (keys > max_key_slots || rows > max_row_slots)) break;
    work.first_key_slot = wave.key_slots;
    work.first_row_slot = wave.row_slots;
    wave.key_slots = keys;
    wave.row_slots = rows;
    wave.heads.push_back(work);
    ++next;
  }
  return wave;
}

template <class Segments>
std::vector<SegmentTask> segment_tasks(const Wave& wave, Segments&& segments) {
  std::vector<SegmentTask> tasks;
  for (std::size_t h = 0; h < wave.heads.size(); ++h) {
    const std::int64_t count = segments(wave.heads[h]);
    for (std::int64_t i = 0; i < count; ++i) tasks.push_back({static_cast<std::int64_t>(h), i});
  }
  return tasks;
}

}  // namespace lln::cpu
