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

// Among the processes that call it with this store, ranks 0 to size - 1. `connect` is how long they
// may take to reach each other; what they exchange later has no limit of its own, as RankWatch
// (rank_watch.h) has one.
Backend make_gloo(const Store& store, int rank, int size, std::chrono::milliseconds connect);
// Throws lln::Error (unsupported) where the build has no NCCL.
Backend make_nccl(const Store& store, int rank, int size, std::chrono::milliseconds connect);

// The text of an exception of c10d without the stack that torch adds.
std::string text_of(const std::exception& e);

}  // namespace lln_torch
