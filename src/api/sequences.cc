// From lengths, masks and origins in host memory to the table of sequences that kernels read.
// SPDX-License-Identifier: Apache-2.0
#include "api/sequences.h"

#include <algorithm>

namespace lln {
namespace {

// The same blocks, counted from as near as can be: any origin behind the last token is in front of
// no token, and one before the first may be moved by whole blocks.
std::int64_t near_origin(std::int64_t origin, std::int64_t block, std::int64_t tokens) {
  return origin < 0 ? origin % block : std::min(origin, tokens);
}

void place(const Problem& p, const AttentionInputs& in, std::int64_t s, Sequence& seq) {
  if (!p.packed) {
    seq.batch = s;
    seq.q_tokens = p.tokens;
    seq.k_tokens = p.tokens_k;
    return;
  }
  const IndexView& cu_q = in.cu_seqlens_q;
  const IndexView& cu_k = in.cu_seqlens_k.given() ? in.cu_seqlens_k : cu_q;
  seq.q_begin = cu_q[s];
  seq.q_tokens = cu_q[s + 1] - cu_q[s];
  seq.k_begin = cu_k[s];
  seq.k_tokens = cu_k[s + 1] - cu_k[s];
}

void find_valid_keys(const AttentionInputs& in, std::int64_t s, Sequence& seq) {
  seq.key_end = in.key_lengths.given() ? in.key_lengths[s] : seq.k_tokens;
  if (in.key_mask.given()) {
    seq.mask = in.key_mask.data + s * in.key_mask.stride[0];
    seq.mask_stride = in.key_mask.stride[1];
    while (seq.key_first < seq.key_end && seq.mask[seq.key_first * seq.mask_stride] == 0) {
      ++seq.key_first;
    }
    while (seq.key_end > seq.key_first && seq.mask[(seq.key_end - 1) * seq.mask_stride] == 0) {
      --seq.key_end;
    }
  }
  if (seq.key_first == seq.key_end) seq.key_first = seq.key_end = 0;
}

}  // namespace

std::vector<Sequence> make_sequences(const Problem& problem, const AttentionInputs& in) {
  std::vector<Sequence> sequences(static_cast<std::size_t>(problem.sequences));
  for (std::int64_t s = 0; s < problem.sequences; ++s) {
    Sequence& seq = sequences[static_cast<std::size_t>(s)];
    place(problem, in, s, seq);
    find_valid_keys(in, s, seq);
    seq.block_origin = problem.block_origins
                           ? near_origin(in.block_origins[s], problem.diag_block, seq.k_tokens)
                           : seq.key_first;
  }
  return sequences;
}

}  // namespace lln
