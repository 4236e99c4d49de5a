// What ranks that train one model must agree on besides gradients: the data, where the run is, the
// weights, and who draws which random numbers.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/module.h>

#include <cstdint>
#include <string>

#include "lln_torch/data/batch.h"
#include "lln_torch/parallel/rank_group.h"
#include "lln_torch/train/checkpoint.h"

namespace lln_torch {

// What tells the data of a source from others, for people too: sizes, and a checksum of what the
// first rows of a batch of `batch_rows` say. Pixels are not in it: their last bits may depend on
// the libraries of a machine.
std::string data_fingerprint(const Source& source, std::int64_t batch_rows);

// The state of rank 0 to all, and a flag with it; all but the seed, which configs have.
bool share_state(const RankGroup& group, RunState& state, bool flag);

// The tensors of rank 0 to all, in place.
void share_tensors(const RankGroup& group, const NamedTensors& tensors);

// Throws lln::Error on all ranks where tensors of one are not, bit for bit, those of rank 0: says
// whose. One pass over the tensors, on their device.
void expect_same(const RankGroup& group, const NamedTensors& tensors, const std::string& what);

// Running values of attentions (buffers in f64) become means over the ranks.
void average_running(const RankGroup& group, const torch::nn::Module& model);

// Random numbers of a step: others on each rank, and the same in a run that was resumed.
void seed_step(std::uint64_t seed, std::int64_t step, int rank);

}  // namespace lln_torch
