// What stands between the API and the kernels: a call whose every rule has been checked, and the
// ordered lists of kernels that may take it. Kernels assume; they never validate.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "lln/attention.h"

namespace lln {

// One sequence: where its rows are, and which of its keys count.
struct Sequence {
  std::int64_t batch = 0;    // index into the tensors' first dimension
  std::int64_t q_begin = 0;  // first row in q, g, o, dq
  std::int64_t q_tokens = 0;
  std::int64_t k_begin = 0;  // first row in k, v, dk, dv
  std::int64_t k_tokens = 0;
  // Valid keys lie in [key_first, key_end), counted from k_begin; both 0 when there are none.
  std::int64_t key_first = 0;
  std::int64_t key_end = 0;
  // Diagonal blocks begin here and at every multiple of the block from here on, and tokens before
  // it are in none. The first valid key, or what the call gives: at most k_tokens, and not a whole
  // block before the first token.
  std::int64_t block_origin = 0;
  // Not null: a byte for each key counted from k_begin, nonzero where valid.
  const std::uint8_t* mask = nullptr;
  std::int64_t mask_stride = 0;

  bool valid(std::int64_t key) const noexcept {
    return key >= key_first && key < key_end && (mask == nullptr || mask[key * mask_stride] != 0);
  }
};

// A call that passed validation. The strides of alpha, beta and the weights are 0 in every
// dimension that broadcasts, so that element() reads them at any index.
struct Call {
  Problem problem;
  AttentionOptions options;
  AttentionInputs in;
  AttentionOutputs out;                 // forward
  AttentionGradients grads;             // backward
  std::span<const Sequence> sequences;  // empty on a device, which finds them itself
  // Decoding (append, step): one slot of math/state.h for each sequence and key head, and the
  // tokens that each sequence has seen. A sequence adds its k_tokens keys; rows are written where q
  // is given.
  float* state = nullptr;
  std::span<const std::int64_t> tokens_before;
  // On a device the tokens are there too, a count for each slot, and the kernel advances them.
  std::int64_t* slot_tokens = nullptr;
  // bytes_of_call() of the chosen kernel, uninitialised; on a device aligned to 256 bytes.
  std::byte* workspace = nullptr;
  Parallel* parallel = nullptr;  // null: run on the calling thread
  void* stream = nullptr;
  // Channels at the end of q and k that are none: zeros, so that rows are whole vectors. Only the
  // kernels that a family pads tensors for know them.
  std::int64_t padding = 0;
};

struct Kernel {
  std::string name;
  // Why the kernel does not take the problem; empty when it does.
  std::string (*refusal)(const Problem&);
  std::size_t (*workspace_bytes)(const Problem&, int workers);
  void (*run)(const Call&);
  DeviceKind device = DeviceKind::cpu;  // where its tensors are; the lists set it
  bool takes_pieces = false;            // is asked about pieces, of whose inputs it may ignore none
  // Where calls of one problem differ by what the problem does not show: what one needs. Or null.
  std::size_t (*call_bytes)(const Call&, int workers) = nullptr;

  std::size_t bytes_of_call(const Call& call, int workers) const {
    return call_bytes != nullptr ? call_bytes(call, workers)
                                 : workspace_bytes(call.problem, workers);
  }
};

// Ordered lists: the first kernel that does not refuse runs; the reference is last. Decoding has
// no reference of its own: what it must give is the causal forward.
std::span<const Kernel> kernels(Op op);

// Element of an f32 or f64 parameter tensor (alpha, beta, weights) as double.
inline double element(const ConstView& v, std::int64_t b, std::int64_t h, std::int64_t n,
                      std::int64_t c) noexcept {
  const std::int64_t i = b * v.stride[0] + h * v.stride[1] + n * v.stride[2] + c * v.stride[3];
  return v.dtype == DType::f64 ? static_cast<const double*>(v.data)[i]
                               : static_cast<const float*>(v.data)[i];
}

inline int worker_count(const Parallel* parallel) noexcept {
  return parallel == nullptr ? 1 : parallel->workers();
}

// Calls body(task, worker) for every task, on the caller's threads.
template <class Body>
void parallel_for(Parallel* parallel, std::int64_t tasks, Body&& body) {
  if (parallel == nullptr || tasks <= 1) {
    for (std::int64_t t = 0; t < tasks; ++t) body(t, 0);
    return;
  }
  using Plain = std::remove_reference_t<Body>;
  parallel->run(
      tasks,
      [](void* context, std::int64_t task, int worker) {
        (*static_cast<Plain*>(context))(task, worker);
      },
      const_cast<void*>(static_cast<const void*>(&body)));
}

}  // namespace lln
