// A call as kernels on the device see it: pointers, strides in elements and numbers, passed by
// value. Which sequences there are is decided on the device where lengths or masks say so, because
// the host cannot look at them without waiting.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "api/kernel.h"

namespace lln::cuda {

// Rows of a tensor [batch, head, token, channel]; channels are contiguous.
struct Rows {
  void* data = nullptr;
  std::int64_t batch = 0, head = 0, token = 0;
};

// alpha or beta, f32 [S, heads, 1, 1]; strides are 0 where it broadcasts. No data: the call has no
// use for it, and it counts as 1.
struct Scale {
  const float* data = nullptr;
  std::int64_t sequence = 0, head = 0;
};

// A weight of LLN+Diag: data[...] where there is data, otherwise the constant; 1 minus that where
// `complement`.
struct Weight {
  const float* data = nullptr;
  std::int64_t batch = 0, head = 0, token = 0, channel = 0;
  float constant = 0;
  bool complement = false;
};

struct DeviceSequence {
  std::int64_t batch;    // index into the tensors' first dimension
  std::int64_t q_begin;  // first row in q, g, o, dq
  std::int64_t q_tokens;
  std::int64_t k_begin;  // first row in k, v, dk, dv
  std::int64_t k_tokens;
  // Valid keys lie in [key_first, key_end), counted from k_begin; both 0 when there are none.
  std::int64_t key_first;
  std::int64_t key_end;
  // Jobs of the sequences before this one, per head (Jobs below).
  std::int64_t q_first_job;
  std::int64_t k_first_job;
  // Diagonal blocks begin here and at every multiple of the block from here on (kernel.h).
  std::int64_t block_origin;
};

// How a sequence of so many tokens is cut into pieces that blocks work on. A function of the length
// alone, so that a sequence gives the same bits alone and in any batch. Sizes are powers of two:
// a division of 64-bit numbers takes a device a hundred instructions.
struct Jobs {
  int shortest_log2 = 8;  // tokens of a piece
  int ordinary_log2 = 10;
  int longest_log2 = 62;
  int every_log2 = 0;  // not 0: of all sequences, for work that gives the same bits in any pieces
  __host__ __device__ int piece_log2(std::int64_t tokens) const {
    if (every_log2 != 0) return every_log2;
    if (tokens <= std::int64_t{2} << shortest_log2) return shortest_log2;
    int log2 = ordinary_log2;
    if (tokens > std::int64_t{8} << ordinary_log2) ++log2;
    if (tokens > std::int64_t{32} << ordinary_log2) ++log2;
    return log2 < longest_log2 ? log2 : longest_log2;
  }
  __host__ __device__ std::int64_t piece(std::int64_t tokens) const {
    return std::int64_t{1} << piece_log2(tokens);
  }
  // At least one, so that there is a block to write the state of an empty sequence.
  __host__ __device__ std::int64_t count(std::int64_t tokens) const {
    return tokens <= 0 ? 1 : ((tokens - 1) >> piece_log2(tokens)) + 1;
  }
  // No sequence of at most so many tokens has more pieces: not the longest one, where a longer
  // sequence has longer pieces.
  __host__ __device__ std::int64_t most_of_one(std::int64_t tokens) const {
    std::int64_t most = count(tokens);
    for (const std::int64_t border :
         {std::int64_t{2} << shortest_log2, std::int64_t{8} << ordinary_log2,
          std::int64_t{32} << ordinary_log2}) {
      if (every_log2 == 0 && border < tokens && count(border) > most) most = count(border);
    }
    return most;
  }
  // No sequences of these tokens together have more pieces.
  std::int64_t most(std::int64_t tokens, std::int64_t sequences) const {
    if (sequences == 0) return 0;
    return (tokens >> (every_log2 != 0 ? every_log2 : shortest_log2)) + 1 + sequences;
  }
};

// All sequences of a call.
struct Sequences {
  const DeviceSequence* table = nullptr;  // null: all are whole, `tokens` and `tokens_k` long
  std::int64_t count = 0;
  std::int64_t tokens = 0, tokens_k = 0;
  Jobs q_jobs, k_jobs;
  std::int64_t q_job_limit = 0, k_job_limit = 0;  // per head; some may be empty where packed
  // Packed: the sequence of each job, -1 where there is no such job. A search among the first jobs
  // of all sequences would wait for memory a dozen times, in every block and for every job.
  const std::int32_t* q_job_sequence = nullptr;
  const std::int32_t* k_job_sequence = nullptr;
  const std::uint8_t* mask = nullptr;  // a byte for each key, nonzero where valid
  std::int64_t mask_batch = 0, mask_token = 0;
};

// Which sequence a job belongs to, and where it begins.
struct JobPlace {
  std::int64_t s = -1;  // -1: there is no such job
  DeviceSequence sequence = {};
  std::int64_t index = 0;  // of the piece in its sequence
};

__device__ inline DeviceSequence sequence_at(const Sequences& all, std::int64_t s) {
  if (all.table != nullptr) return all.table[s];
  return {s,
          0,
          all.tokens,
          0,
          all.tokens_k,
          0,
          all.tokens_k,
          s * all.q_jobs.count(all.tokens),
          s * all.k_jobs.count(all.tokens_k),
          0};
}

template <bool kKeys>
__device__ inline JobPlace find_job(const Sequences& all, std::int64_t job) {
  JobPlace place;
  if (const std::int32_t* const sequence = kKeys ? all.k_job_sequence : all.q_job_sequence;
      sequence != nullptr) {
    place.s = sequence[job];
    if (place.s < 0) return place;
    place.sequence = all.table[place.s];
    place.index = job - (kKeys ? place.sequence.k_first_job : place.sequence.q_first_job);
    return place;
  }
  // Fewer jobs than blocks in a grid, so that 32 bits hold them.
  const Jobs& jobs = kKeys ? all.k_jobs : all.q_jobs;
  const auto each = static_cast<std::uint32_t>(jobs.count(kKeys ? all.tokens_k : all.tokens));
  place.s = static_cast<std::uint32_t>(job) / each;
  place.sequence = sequence_at(all, place.s);
  place.index = static_cast<std::uint32_t>(job) % each;
  return place;
}

// Whether a key of the sequence counts.
__device__ inline bool key_valid(const Sequences& all, const DeviceSequence& sequence,
                                 std::int64_t key) {
  if (key < sequence.key_first || key >= sequence.key_end) return false;
  return all.mask == nullptr ||
         all.mask[sequence.batch * all.mask_batch + key * all.mask_token] != 0;
}

__device__ inline float scale_at(const Scale& scale, std::int64_t s, std::int64_t head) {
  return scale.data == nullptr ? 1.0F : scale.data[s * scale.sequence + head * scale.head];
}

__device__ inline float weight_at(const Weight& weight, std::int64_t b, std::int64_t h,
                                  std::int64_t n, std::int64_t c) {
  const float value =
      weight.data == nullptr
          ? weight.constant
          : weight.data[b * weight.batch + h * weight.head + n * weight.token + c * weight.channel];
  return weight.complement ? 1 - value : value;
}

// What all kernels of attention share.
struct DeviceCall {
  DType dtype;
  std::int64_t heads, heads_k, dim, dim_v;
  Kind kind;
  // Those of dim that there are: weights of the others, which are padding, are 0 (padded.h).
  std::int32_t channels;
  std::int64_t diag_block;
  Feature feature;
  float power;
  Rows q, k, v, o;     // forward
  Rows g, dq, dk, dv;  // backward
  Scale alpha, beta;
  Weight lln_weight, diag_weight;
  Sequences sequences;
};

Rows rows_of(const ConstView& view);
// Fills everything but the jobs and the table.
DeviceCall make_device_call(const Call& call);
bool needs_table(const Problem& problem);
std::size_t table_bytes(const Problem& problem);  // a multiple of 256; 0 where none is needed
// Launches the kernel that writes the table (where one is needed: then `table` is device memory of
// table_bytes()) and sets sequences.table, the job limits and the jobs. Lengths out of range are
// cut to what the tensors hold, cumulative lengths that are not right leave all sequences without a
// token; both are reported (device.h).
void prepare_sequences(const Call& call, const Jobs& q_jobs, const Jobs& k_jobs, void* table,
                       DeviceCall& device);

}  // namespace lln::cuda
