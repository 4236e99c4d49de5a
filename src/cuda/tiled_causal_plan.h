// How the host prepares a walk of the causal tiled family, for attention and for appends to a
// decode state.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_causal_call.h"

namespace lln::cuda {

// Why the walks do not take a problem; empty where they do.
std::string tiled_causal_refusal(const Problem& p);
std::string sm90_causal_refusal(const Problem& p);

// The part of that which no dtype changes, for kernels of up to `widest` channels.
std::string causal_refusal(const Problem& p, std::int64_t widest = 128);

struct CausalWork {
  CausalCall causal;
  CausalPlan plan;
  DeviceSequence* table = nullptr;  // of causal.call.sequences, where there is one
};

// Scratch memory of a walk. Its flags come first: the rest is free when the walk is done.
std::size_t causal_flag_bytes(const Problem& p);
std::size_t causal_scratch_bytes(const Problem& p);

// Of a call whose walks and what goes with them need `walks`: with room for run_plain_again().
std::size_t causal_bytes(const Problem& p, std::size_t walks, int workers);

// A call with its scratch memory laid out at the workspace, and its flags and its table of
// sequences under way.
CausalWork prepare_causal(const Call& call);

// The plain kernels compute the heads that the walks have flagged.
void run_plain_again(const Call& call, const CausalWork& work);

// What a causal family does with calls of LLN+Diag whose weights its walks do not hold, and with
// gradients of parameters: two calls, or calls beside its own.
struct CausalCalls {
  bool (*holds_weights)(const Call&);
  std::size_t (*own_bytes)(const Problem&, int workers);

  std::size_t bytes(const Problem& p, int workers) const;
  std::size_t call_bytes(const Call& call, int workers) const;
  // Whether that was all; otherwise the walks take the call.
  bool run_apart(const Call& call, void (*run)(const Call&)) const;
};
bool by_channel(const ConstView& weight);

}  // namespace lln::cuda
