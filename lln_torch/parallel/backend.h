// The engines that move tensors between processes: c10d's Gloo and, where the build has CUDA, NCCL.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <chrono>
#include <string>

namespace lln_torch {

using Backend = c10::intrusive_ptr<c10d::Backend>;
using Store = c10::intrusive_ptr<c10d::Store>;

// Among the processes that call it with this store, ranks 0 to size - 1, which may take `timeout`
// to reach each other. What they exchange later has no limit of its own, as RankWatch
// (rank_watch.h) has one.
Backend make_gloo(const Store& store, int rank, int size, std::chrono::milliseconds timeout);
// An exchange that is not done after `timeout` is an error of the backend. RankWatch looks at those
// and ends the process; otherwise c10d does, a minute later. Throws lln::Error (unsupported) where
// the build has no NCCL.
Backend make_nccl(const Store& store, int rank, int size, std::chrono::milliseconds timeout);

// The text of an exception of c10d without the stack that torch adds.
std::string text_of(const std::exception& e);

}  // namespace lln_torch
