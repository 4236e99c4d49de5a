// What the rest of the library asks of CUDA: a description of what there is, and scratch memory.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/host.h"

#include <fmt/format.h>

#include "cuda/device.h"

namespace lln::cuda {
namespace {

std::string version_text(int version) {  // 13000 is 13.0
  return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

}  // namespace

std::string absence() { return {}; }

const char* architectures() { return LLN_CUDA_ARCHITECTURES; }

BuildInfo::Cuda describe() {
  BuildInfo::Cuda cuda;
  cuda.toolkit = LLN_CUDA_TOOLKIT;
  cuda.architectures = architectures();
  int version = 0;
  if (cudaDriverGetVersion(&version) == cudaSuccess && version > 0) {
    cuda.driver = version_text(version);
  }
  const int count = device_count(cuda.no_devices);
  for (int index = 0; index < count; ++index) {
    cudaDeviceProp properties = {};
    check(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
    cuda.devices.push_back({properties.name, 10 * properties.major + properties.minor,
                            properties.multiProcessorCount, properties.totalGlobalMem,
                            device_refusal(index)});
  }
  return cuda;
}

Scratch::Scratch(std::size_t bytes, void* stream) : stream_(stream) {
  void* memory = nullptr;
  const cudaError_t status = cudaMallocAsync(&memory, bytes, static_cast<cudaStream_t>(stream));
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    return;
  }
  check(status, "cudaMallocAsync");
  data_ = static_cast<std::byte*>(memory);
}

Scratch::~Scratch() {
  if (data_ == nullptr) return;
  if (cudaFreeAsync(data_, static_cast<cudaStream_t>(stream_)) != cudaSuccess) cudaGetLastError();
}

}  // namespace lln::cuda
