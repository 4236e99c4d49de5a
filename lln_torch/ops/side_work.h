// Work beside the work of the current stream, where a device can do both at a time: calls that are
// too short to fill it. For where the host is not what the device waits for, as in CUDA graphs.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>
#include <c10/core/StreamGuard.h>

#include <memory>
#include <optional>
#include <utility>

#include "lln_torch/ops/pieces.h"

namespace lln_torch {

// Memory: what run() allocates must not outlive it, and what it works on is kept until join() by
// whoever called. Then torch's allocator, which knows memory by the stream it was asked for in,
// hands out none of it too early. In host memory there is nothing beside: run() does the work.
// Threads that work on one device at a time share the stream, so none of them may capture a graph.
class SideWork {
 public:
  // Begins when what the current stream of the device has by now is done.
  explicit SideWork(const c10::Device& device);
  SideWork(SideWork&& other) noexcept;
  SideWork& operator=(SideWork&&) = delete;
  ~SideWork();  // joins
  template <class Work>
  void run(Work&& work) const {
    const c10::OptionalStreamGuard guard(side_);
    std::forward<Work>(work)();
  }
  // What is put into the stream from now on comes after it.
  void join();

 private:
  std::optional<c10::Stream> stream_, side_;
};

// The state of a call's keys, which its backward pass makes again instead of keeping it: beside the
// work that the pass does before it comes to the call. The order: remember() in the forward pass,
// begin() when a gradient arrives that leads to the call's, take() in the call's own.
class StateAgain {
 public:
  // `call`: the arguments that the state depends on, q in the type and form of the call.
  void remember(const PieceCall& call);
  void begin();
  // Not defined where nothing was begun. Nothing is remembered after it.
  TensorState take();

 private:
  PieceCall call_;
  TensorState state_;
  at::Tensor rows_;               // none, which the call writes nothing to
  std::optional<SideWork> work_;  // joins before the others go
};

}  // namespace lln_torch
