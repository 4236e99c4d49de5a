// What is left when rows and keys are done: the gradients of alpha, beta and weights from the sums
// of all blocks, and rows of packed calls that belong to no sequence.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/plain_call.cuh"

namespace lln::cuda::plain {

enum class Parameter { alpha, beta, weight };

// One element of a parameter's gradient to a block: the sum over the dimensions in which the
// parameter broadcasts, in an order that depends on nothing but their sizes.
struct ParameterSums {
  PlainCall p;
  Parameter parameter;
  ParameterGradient to;
  static constexpr const char* kName = "cuda-plain parameter sums";

  template <class Block>
  __device__ void operator()(Block& block, std::int64_t index) const {
    const std::int64_t c = index % to.shape[3], h = index / to.shape[3] % to.shape[1],
                       s = index / to.shape[3] / to.shape[1];
    const std::int64_t heads = parameter == Parameter::beta ? p.call.heads_k : p.call.heads;
    const std::int64_t first_head = to.shape[1] == heads ? h : 0;
    const std::int64_t head_count = to.shape[1] == heads ? 1 : heads;
    std::int64_t first_job = 0, job_count = 0;
    find_jobs(s, first_job, job_count);
    auto* const sums = reinterpret_cast<double*>(block.shared());
    block.run([&](int t) {
      double sum = 0;
      for (std::int64_t i = t; i < job_count * p.parts * head_count; i += kThreads) {
        const std::int64_t slot =
            (first_job * p.parts + i / head_count) * heads + first_head + i % head_count;
        sum += static_cast<double>(term(slot, c));
      }
      sums[t] = sum;
    });
    block.run([&](int t) {
      if (t != 0) return;
      double sum = 0;
      for (int i = 0; i < kThreads; ++i) sum += sums[i];
      to.data[s * to.stride[0] + h * to.stride[1] + c * to.stride[3]] = static_cast<float>(sum);
    });
  }

 private:
  // The jobs whose sums count: those of a sequence, or all.
  __device__ void find_jobs(std::int64_t s, std::int64_t& first, std::int64_t& count) const {
    const Sequences& all = p.call.sequences;
    const bool keys = parameter == Parameter::beta;
    if (parameter == Parameter::weight || to.shape[0] != all.count) {
      first = 0;
      count = keys ? p.k_jobs : p.q_jobs;
      return;
    }
    const DeviceSequence sequence = sequence_at(all, s);
    const PieceList pieces =
        keys ? pieces_of<true>(p, s, sequence) : pieces_of<false>(p, s, sequence);
    first = pieces.first_job;
    count = pieces.count;
  }

  __device__ float term(std::int64_t slot, std::int64_t c) const {
    if (parameter == Parameter::alpha) return p.alpha_sums[slot];
    if (parameter == Parameter::beta) return p.beta_sums[slot];
    const float* const lln = p.weight_sums + slot * 2 * (p.dim_v + 1);
    const std::int64_t at = to.shape[3] == p.dim_v ? c : p.dim_v;
    return to.lln * lln[at] + to.diag * lln[p.dim_v + 1 + at];
  }
};

// Rows behind the last sequence of a packed call: there are some where cu_seqlens were wrong.
struct ZeroRows {
  PlainCall p;
  bool backward;
  static constexpr const char* kName = "cuda-plain rows without a sequence";
  static constexpr int kRows = 64;

  template <class Block>
  __device__ void operator()(Block& block, std::int64_t index) const {
    const Sequences& all = p.call.sequences;
    const DeviceSequence last = all.table[all.count - 1];
    const std::int64_t q_end = last.q_begin + last.q_tokens, k_end = last.k_begin + last.k_tokens;
    const std::int64_t n = index * kRows;
    if (!backward) {
      zero(block, p.call.o, n, q_end, all.tokens, p.call.heads, p.dim_v);
      return;
    }
    zero(block, p.call.dq, n, q_end, all.tokens, p.call.heads, p.dim);
    zero(block, p.call.dk, n, k_end, all.tokens_k, p.call.heads_k, p.dim);
    zero(block, p.call.dv, n, k_end, all.tokens_k, p.call.heads_k, p.dim_v);
    for (const ParameterGradient& to : p.weights) {
      if (to.data == nullptr || !to.per_token) continue;
      for_each_element(block, static_cast<int>(p.call.heads), kRows, [&](int h, int r) {
        if (n + r < q_end || n + r >= all.tokens) return;
        to.data[h * to.stride[1] + (n + r) * to.stride[2]] = 0;
      });
    }
  }

 private:
  template <class Block>
  __device__ void zero(Block& block, const Rows& rows, std::int64_t n, std::int64_t begin,
                       std::int64_t end, std::int64_t heads, int width) const {
    if (n + kRows <= begin || n >= end) return;
    for (std::int64_t h = 0; h < heads; ++h) {
      for_each_element(block, kRows, width, [&](int r, int c) {
        if (n + r < begin || n + r >= end) return;
        store(rows.data, p.call.dtype, row_offset(rows, 0, h, n + r) + c, 0);
      });
    }
  }
};

}  // namespace lln::cuda::plain
