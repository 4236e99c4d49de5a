// How the host prepares a walk of the causal tiled family, for attention and for appends to a
// decode state.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_causal_call.h"

namespace lln::cuda {

// Why the walks do not take a problem; empty where they do.
std::string tiled_causal_refusal(const Problem& p);
std::string sm90_causal_refusal(const Problem& p);

struct CausalWork {
  CausalCall causal;
  CausalPlan plan;
  DeviceSequence* table = nullptr;  // of causal.call.sequences, where there is one
};

// Scratch memory of a walk. Its flags come first: the rest is free when the walk is done.
std::size_t causal_flag_bytes(const Problem& p);
std::size_t causal_scratch_bytes(const Problem& p);

// A call with its scratch memory laid out at the workspace, and its flags and its table of
// sequences under way.
CausalWork prepare_causal(const Call& call);

}  // namespace lln::cuda
