// What ranks that train one model must agree on besides gradients: where the run is, the weights
// that they start from, and who draws which random numbers.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/module.h>

#include <cstdint>

#include "lln_torch/parallel/rank_group.h"
#include "lln_torch/train/checkpoint.h"

namespace lln_torch {

// The state of rank 0 to all, and a flag with it; all but the seed, which configs have.
bool share_state(const RankGroup& group, RunState& state, bool flag);

// The tensors of rank 0 to all, in place.
void share_tensors(const RankGroup& group, const NamedTensors& tensors);

// Throws lln::Error on the ranks whose tensors are not, bit for bit, those of rank 0.
void expect_same(const RankGroup& group, const NamedTensors& tensors, const char* what);

// Running values of attentions (buffers in f64) become means over the ranks.
void average_running(const RankGroup& group, const torch::nn::Module& model);

// Random numbers of a step: others on each rank, and the same in a run that was resumed.
void seed_step(std::uint64_t seed, std::int64_t step, int rank);

}  // namespace lln_torch
