// What the tiled kernels get besides the call: where states and partial sums lie.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/device_call.h"

namespace lln::cuda {

// (c, C) for each sequence and key head, f32: c in natural logarithms.
struct StateView {
  float* c = nullptr;  // null: there is none
  std::int64_t c_sequence = 0, c_head = 0;
  float* values = nullptr;
  std::int64_t sequence = 0, head = 0, row = 0;

  __device__ float* c_at(std::int64_t s, std::int64_t h) const {
    return c + s * c_sequence + h * c_head;
  }
  __device__ float* values_at(std::int64_t s, std::int64_t h) const {
    return values + s * sequence + h * head;
  }
  __host__ __device__ bool given() const { return c != nullptr; }
};

// Sums of one piece of a sequence for one head, in the slot job * heads + head.
struct Partials {
  float* m = nullptr;       // [slot, dim]: reference exponent, log2 (sums over keys)
  float* s = nullptr;       // [slot, dim]: mass; or t = W^T delta (sums over rows)
  float* values = nullptr;  // [slot, dim, dim_v]: average; or dC = W^T g
};

struct TiledCall {
  DeviceCall call;
  StateView state;  // (c, C)
  StateView grads;  // backward: t in place of c, dC in place of C
  // Pieces of a longer sequence: the state of keys elsewhere, and the gradients of that of all keys
  // and of the given one.
  StateView given, dsaved, dstate;
  Partials keys;  // [key jobs * heads_k]
  Partials rows;  // backward: [row jobs * heads]
  // Block-diagonal part of the backward, for each query head and row of q: log2 of the row's mass
  // and its delta, [heads, rows of all batches].
  float* diag_mass = nullptr;
  float* diag_delta = nullptr;
  std::int64_t diag_rows = 0;
  // Diag alone, and beside an LLN part of another family: rows see no keys behind them, and results
  // are added to those of the LLN part, which are there. Kernels with LLN know neither.
  bool causal = false, adds = false;
  // Key jobs of the sums: pieces of the valid keys, so that padding changes no bits. Slots for so
  // many pieces of every sequence or, where it is 0, the table's key jobs (packed).
  std::uint32_t key_pieces = 0;
  // Key jobs of the last backward pass: pieces of so many keys of every batch or, where it is 0,
  // the table's key jobs (packed).
  int key_rows_piece_log2 = 0;
};

// The first slot of a sequence's key sums, and how many pieces it has.
struct KeyPieces {
  std::int64_t first, count;
};
__device__ inline KeyPieces key_pieces(const TiledCall& tiled, std::int64_t s,
                                       const DeviceSequence& sequence) {
  const Jobs& jobs = tiled.call.sequences.k_jobs;
  return {tiled.key_pieces > 0 ? s * tiled.key_pieces : sequence.k_first_job,
          jobs.count(sequence.key_end - sequence.key_first)};
}

// A key job of the sums.
__device__ inline JobPlace find_key_piece(const TiledCall& tiled, std::uint32_t job) {
  const Sequences& all = tiled.call.sequences;
  if (tiled.key_pieces == 0) return find_job<true>(all, job);
  JobPlace place;
  place.sequence = sequence_at(all, job / tiled.key_pieces);
  place.index = job % tiled.key_pieces;
  const DeviceSequence& at = place.sequence;
  if (place.index < all.k_jobs.count(at.key_end - at.key_first)) place.s = job / tiled.key_pieces;
  return place;
}

}  // namespace lln::cuda
