// Steps as CUDA graphs, over torch's own: its allocator keeps the memory of the graph apart, and
// its generators move their offsets with every replay.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/cuda_graph.h"

#include <ATen/Context.h>
#include <ATen/cuda/CUDAEvent.h>
#include <ATen/cuda/CUDAGraph.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <fmt/format.h>

#include "lln/error.h"

namespace lln_torch {
namespace {

// Calls before the capture: libraries choose algorithms and allocate workspaces in them, which a
// capture must not do. torch's documentation asks for three.
constexpr int kCallsBeforeCapture = 3;

// The work of `behind` waits for what was put into `first` until now.
void order_streams(const c10::cuda::CUDAStream& first, const c10::cuda::CUDAStream& behind) {
  at::cuda::CUDAEvent done;
  done.record(first);
  done.block(behind);
}

// One stream for all graphs, not the default one, which cannot be captured: torch keeps workspaces
// of cuBLAS for every stream that ever multiplied.
c10::cuda::CUDAStream graph_stream() {
  static const c10::cuda::CUDAStream stream = c10::cuda::getStreamFromPool();
  return stream;
}

}  // namespace

std::string step_graph_obstacle() { return at::hasCUDA() ? "" : "there is no CUDA device here"; }

struct StepGraph::Impl {
  c10::cuda::CUDAStream stream = graph_stream();
  at::cuda::CUDAGraph graph;
  int calls = 0;

  // The stream is of use again only when its capture has ended, which fails as well.
  void end_failed_capture() noexcept {
    try {
      graph.capture_end();
    } catch (const std::exception&) {
    }
  }

  [[noreturn]] static void refuse(const char* reason) {
    throw lln::Error(lln::ErrorCode::unsupported,
                     fmt::format("the training step cannot be captured in a CUDA graph: set "
                                 "train.cuda_graph = false. The reason: {}",
                                 reason));
  }

  void capture(const std::function<void()>& body) {
    c10::cuda::device_synchronize();
    // The graph has memory of its own: what the steps before it took would lie idle beside it.
    c10::cuda::CUDACachingAllocator::emptyCache();
    graph.capture_begin();
    try {
      body();
    } catch (const c10::OutOfMemoryError&) {
      end_failed_capture();
      throw;
    } catch (const lln::Error& e) {
      end_failed_capture();
      if (e.code() == lln::ErrorCode::out_of_memory) throw;
      refuse(e.what());
    } catch (const c10::Error& e) {
      end_failed_capture();
      refuse(e.what_without_backtrace());
    }
    try {
      graph.capture_end();
    } catch (const c10::Error& e) {
      refuse(e.what_without_backtrace());
    }
  }
};

StepGraph::StepGraph() : impl_(std::make_unique<Impl>()) {}
StepGraph::~StepGraph() = default;

void StepGraph::run(const std::function<void()>& body) {
  const c10::cuda::CUDAStream outside = c10::cuda::getCurrentCUDAStream();
  order_streams(outside, impl_->stream);
  {
    const c10::cuda::CUDAStreamGuard guard(impl_->stream);
    if (impl_->calls < kCallsBeforeCapture) {
      body();
    } else {
      if (impl_->calls == kCallsBeforeCapture) {
        impl_->capture(body);
      }
      impl_->graph.replay();  // a capture records and computes nothing
    }
    ++impl_->calls;
  }
  order_streams(impl_->stream, outside);
}

}  // namespace lln_torch
