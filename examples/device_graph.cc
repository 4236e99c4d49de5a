// LLN+Diag attention on memory of a CUDA device: temperatures matched to q and k there, the forward
// pass behind them in the same stream, both captured once as a CUDA graph and replayed on new data.
// The host never waits for the device before the end. Built where CUDA is (CMakeLists.txt).
// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include "lln/lln.h"

namespace {

void check(cudaError_t status) {
  if (status == cudaSuccess) return;
  std::fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(status));
  std::exit(1);
}

// Memory of the device, freed at the end.
struct DeviceMemory {
  explicit DeviceMemory(std::size_t bytes) : size(bytes) { check(cudaMalloc(&data, bytes)); }
  ~DeviceMemory() { cudaFree(data); }
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;
  void* data = nullptr;
  std::size_t size;
};

// Not random, but no two tokens are alike.
std::vector<float> waves(std::size_t count, float phase) {
  std::vector<float> x(count);
  for (std::size_t i = 0; i < count; ++i) x[i] = std::sin(phase + 0.37F * static_cast<float>(i));
  return x;
}

}  // namespace

int main() {
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    std::printf("no CUDA device here: nothing to show\n");
    return 0;
  }
  const lln::Shape shape{2, 12, 4096, 64};  // [batch, head, token, channel]
  const std::size_t count = 2 * 12 * 4096 * 64, bytes = count * sizeof(float);
  DeviceMemory q(bytes), k(bytes), v(bytes), o(bytes), scales(2 * 2 * 12 * sizeof(float));
  const lln::Device device = lln::cuda_device();
  const auto tensor = [&](const DeviceMemory& memory) {
    return lln::on(device, lln::view(memory.data, lln::DType::f32, shape));
  };
  float* const alpha = static_cast<float*>(scales.data);
  float* const beta = alpha + 2 * 12;
  const lln::Shape per_head{2, 12, 1, 1};  // [sequence, head, 1, 1]
  const lln::View alpha_view = lln::on(device, lln::view(alpha, per_head));
  const lln::View beta_view = lln::on(device, lln::view(beta, per_head));

  const lln::MatchingInputs pair{.q = tensor(q), .k = tensor(k)};
  const lln::AttentionInputs in{
      .q = tensor(q), .k = tensor(k), .v = tensor(v), .alpha = alpha_view, .beta = beta_view};
  const lln::AttentionOptions options{.kind = lln::Kind::lln_diag};
  cudaStream_t stream = nullptr;
  check(cudaStreamCreate(&stream));

  // Captured, not run: workspaces become part of the graph.
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t program = nullptr;
  try {
    check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    lln::match_moments(pair, {alpha_view, beta_view}, {}, {.stream = stream});
    lln::attention_forward(in, {.o = tensor(o)}, options, {.stream = stream});
    check(cudaStreamEndCapture(stream, &graph));
    check(cudaGraphInstantiate(&program, graph, 0));
  } catch (const lln::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }

  for (const float phase : {0.0F, 1.0F}) {
    check(cudaMemcpy(q.data, waves(count, phase).data(), bytes, cudaMemcpyHostToDevice));
    check(cudaMemcpy(k.data, waves(count, phase + 2).data(), bytes, cudaMemcpyHostToDevice));
    check(cudaMemcpy(v.data, waves(count, phase + 4).data(), bytes, cudaMemcpyHostToDevice));
    check(cudaGraphLaunch(program, stream));
    check(cudaStreamSynchronize(stream));
    float first = 0, first_alpha = 0;
    check(cudaMemcpy(&first, o.data, sizeof first, cudaMemcpyDeviceToHost));
    check(cudaMemcpy(&first_alpha, alpha, sizeof first_alpha, cudaMemcpyDeviceToHost));
    std::printf("o[0] = %g with alpha = %g\n", first, first_alpha);
  }
  cudaGraphExecDestroy(program);
  cudaGraphDestroy(graph);
  cudaStreamDestroy(stream);
}
