// What the causal kernels get besides the call, which piece of a sequence a block walks, and the
// launches of their passes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_call.h"

namespace lln::cuda {

inline constexpr int kChunk = 64;  // tokens
// Pieces of a sequence, counted from its first valid key, are walked by different blocks. So long
// that all but the longest sequences are one piece, whose state never leaves the chip, and so short
// that one head of a million tokens still fills a large device.
inline constexpr int kCausalPieceLog2 = 12;
inline constexpr Jobs kCausalJobs{kCausalPieceLog2, kCausalPieceLog2, kCausalPieceLog2};

struct CausalCall {
  DeviceCall call;
  StateView saved;  // (c, C) after the last token; no data: not asked for
  // Forward, in sequence times heads_k: s and K of keys before the first token of each sequence,
  // which its rows see; and those of the sequence itself. No data: there are none, not asked for.
  Partials given, own;
  // s and K of the keys before each piece but the first of a sequence, in CausalPiece::slot times
  // heads_k; null where every sequence is one piece.
  Partials before;
  // Backward: T and G of the rows of such a piece and all behind it, in CausalPiece::slot times
  // heads. Sums over the heads of a group lie at the first of them.
  Partials behind;
  // Backward, for each query head and row of q, [heads, rows of all batches]: 1 / mass, delta.
  float* inverse = nullptr;
  float* delta = nullptr;
  float* diag_mass = nullptr;  // log2 of the row's mass in its block
  float* diag_delta = nullptr;
  float* diag_weight = nullptr;
  std::int64_t rows = 0;
  // [1 + sequences * heads_k]: whether any head, and which, is out of reach of these kernels.
  std::uint32_t* flags = nullptr;
  int diag_log2 = 0;  // log2 of the diagonal block
};

// Which tokens a block walks.
struct CausalPiece {
  std::int64_t s = -1;  // -1: none
  std::int64_t head, head_k;
  DeviceSequence sequence;
  std::int64_t begin;  // in the sequence
  // Numbers the pieces of all sequences but the first one of each; the next piece has the next.
  std::int64_t slot;
  int count;
  bool first, last;

  // The first of them.
  template <class T>
  __device__ T* rows(const Rows& tensor) const {
    return static_cast<T*>(tensor.data) + sequence.batch * tensor.batch + head * tensor.head +
           (sequence.q_begin + begin) * tensor.token;
  }
  template <class T>
  __device__ T* keys(const Rows& tensor) const {
    return static_cast<T*>(tensor.data) + sequence.batch * tensor.batch + head_k * tensor.head +
           (sequence.k_begin + begin) * tensor.token;
  }
};

// Pieces of one sequence begin a piece apart, and between those of two sequences lies a first
// piece, which needs no slot.
template <int kPieceLog2 = kCausalPieceLog2>
__device__ inline std::int64_t causal_slot(const DeviceCall& call, const DeviceSequence& sequence,
                                           std::int64_t begin) {
  return (sequence.batch * call.sequences.tokens + sequence.q_begin + begin) >> kPieceLog2;
}

// The piece of each job and head, of q or of k: a block's own, or that of several.
template <bool kKeyHeads, int kPieceLog2 = kCausalPieceLog2>
__device__ inline CausalPiece find_causal_piece(const DeviceCall& call,
                                                std::uint32_t block = blockIdx.x) {
  CausalPiece piece;
  const auto heads = static_cast<std::uint32_t>(kKeyHeads ? call.heads_k : call.heads);
  const std::uint32_t group =
      static_cast<std::uint32_t>(call.heads) / static_cast<std::uint32_t>(call.heads_k);
  const std::uint32_t head = block % heads;
  piece.head = kKeyHeads ? head * group : head;
  piece.head_k = kKeyHeads ? head : head / group;
  const JobPlace place = find_job<false>(call.sequences, block / heads);
  const DeviceSequence& sequence = piece.sequence = place.sequence;
  piece.begin = sequence.key_first + (place.index << kPieceLog2);
  piece.slot = causal_slot<kPieceLog2>(call, sequence, piece.begin);
  const std::int64_t left = sequence.q_tokens - piece.begin;
  piece.first = place.index == 0;
  piece.last = left <= std::int64_t{1} << kPieceLog2;
  piece.count = static_cast<int>(min(left, std::int64_t{1} << kPieceLog2));
  if (place.s >= 0 && (piece.first || left > 0)) piece.s = place.s;
  return piece;
}

// Of the first row of a piece in CausalCall::inverse and the like, for a query head.
__device__ inline std::int64_t statistics_at(const CausalCall& causal, const CausalPiece& piece,
                                             std::int64_t head) {
  return head * causal.rows + piece.sequence.batch * causal.call.sequences.tokens +
         piece.sequence.q_begin + piece.begin;
}

struct CausalPlan {
  int width = 0;        // 64 or 128
  bool pieces = false;  // some sequence has more than one piece
  std::int64_t jobs = 0;
  cudaStream_t stream = nullptr;
};

using CausalLaunch = void (*)(const CausalCall&, const CausalPlan&);
void launch_causal_forward(const CausalCall& causal, const CausalPlan& plan);
void launch_causal_backward(const CausalCall& causal, const CausalPlan& plan);
// Sums of pieces to sums of all pieces before each (keys), or of all behind each and of all query
// heads of a group (rows).
void launch_join_before(const CausalCall& causal, const CausalPlan& plan);
void launch_join_behind(const CausalCall& causal, const CausalPlan& plan);

}  // namespace lln::cuda
