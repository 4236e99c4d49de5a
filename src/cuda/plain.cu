// The entries of the plain kernels in the kernel lists, and their launches on a device.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/plain.h"

#include <algorithm>

#include "cuda/instructions.cuh"
#include "cuda/launch.h"
#include "cuda/plain_plan.cuh"

namespace lln::cuda {
namespace {

using namespace plain;

// A block of threads on the device (plain_block.cuh).
struct DeviceBlock {
  __device__ static float* shared() {
    LLN_DYNAMIC_SHARED(memory);
    return reinterpret_cast<float*>(memory);
  }
  template <class Phase>
  __device__ static void run(Phase phase) {
    phase(static_cast<int>(threadIdx.x));
    __syncthreads();
  }
};

// All blocks of a body; none where there is `any` and it is 0.
template <class Body>
__global__ void __launch_bounds__(kThreads, 3)
    plain_kernel(const __grid_constant__ Body body, const std::int64_t blocks,
                 const std::uint32_t* any) {
  if (any != nullptr && *any == 0) return;
  DeviceBlock block;
  for (std::int64_t i = blockIdx.x; i < blocks; i += gridDim.x) {
    body(block, i);
    __syncthreads();
  }
}

struct DeviceLaunch {
  cudaStream_t stream;
  const std::uint32_t* any = nullptr;

  template <class Body>
  void operator()(const Body& body, std::int64_t blocks, int shared) const {
    // Kernels that hardly ever have work ask with few blocks; rows without a sequence are no
    // head's.
    constexpr std::int64_t kMostBlocks = 1 << 30, kFewBlocks = 256;
    const bool rarely = any != nullptr && !std::is_same_v<Body, ZeroRows>;
    const std::int64_t grid = std::min(blocks, rarely ? kFewBlocks : kMostBlocks);
    launch(Body::kName, plain_kernel<Body>,
           LaunchShape{grid, kThreads, shared, stream, false, kSharedBytes}, body, blocks,
           rarely ? any : nullptr);
  }
};

std::string refusal(const Problem& problem, Op op) {
  if (problem.op != op) {
    return std::string("computes ") + to_string(op) + ", not " + to_string(problem.op);
  }
  if (problem.device.kind != DeviceKind::cuda) return "is for tensors on CUDA devices";
  if (problem.kind == Kind::softmax) return "softmax is not computed on CUDA devices";
  if (problem.dtype == DType::f64) return "f64 is taken by the reference alone";
  return device_refusal(problem.device.index);
}

std::string forward_refusal(const Problem& problem) { return refusal(problem, Op::forward); }
std::string backward_refusal(const Problem& problem) { return refusal(problem, Op::backward); }

std::size_t workspace_bytes(const Problem& problem, int) {
  Workspace workspace(nullptr);
  workspace.bytes(table_bytes(problem));
  lay_out(problem, workspace);
  return workspace.used();
}

PlainCall prepare(const Call& call) {
  Workspace workspace(call.workspace);
  std::byte* const table = workspace.bytes(table_bytes(call.problem));
  PlainCall p = make_plain_call(call, workspace);
  p.call = make_device_call(call);
  prepare_sequences(call, kJobs, kJobs, table, p.call);
  return p;
}

void run_forward(const Call& call) {
  const DeviceLaunch launch{static_cast<cudaStream_t>(call.stream)};
  launch_forward(prepare(call), launch);
}

void run_backward(const Call& call) {
  const DeviceLaunch launch{static_cast<cudaStream_t>(call.stream)};
  launch_backward(prepare(call), launch);
}

}  // namespace

void run_plain_heads(const Call& call, const std::uint32_t* flags) {
  DeviceLaunch launch{static_cast<cudaStream_t>(call.stream), flags};
  PlainCall p = prepare(call);
  p.only = flags + 1;
  if (call.problem.op == Op::forward) {
    launch_forward(p, launch);
  } else {
    launch_backward(p, launch);
  }
}

std::vector<Kernel> plain_forward_kernels() {
  return {{"cuda-plain", forward_refusal, workspace_bytes, run_forward, DeviceKind::cuda,
           /*takes_pieces=*/true}};
}

std::vector<Kernel> plain_backward_kernels() {
  return {{"cuda-plain", backward_refusal, workspace_bytes, run_backward, DeviceKind::cuda,
           /*takes_pieces=*/true}};
}

}  // namespace lln::cuda
