// Device memory by the CUDA runtime.
// SPDX-License-Identifier: Apache-2.0
#include "conformance/device_memory.h"

#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "lln/error.h"

namespace lln::conformance {
namespace {

constexpr std::size_t kGuard = 256;
constexpr int kPoison = 0xFF;

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw Error(status == cudaErrorMemoryAllocation ? ErrorCode::out_of_memory : ErrorCode::device,
              std::string(what) + ": " + cudaGetErrorString(status));
}

void wait_for(Device device) {
  check(cudaSetDevice(device.index), "cudaSetDevice");
  check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
}

}  // namespace

DeviceMemory::DeviceMemory(Device device, std::size_t bytes, std::size_t shift)
    : device_(device), bytes_(bytes) {
  check(cudaSetDevice(device.index), "cudaSetDevice");
  void* memory = nullptr;
  check(cudaMalloc(&memory, kGuard + shift + bytes + kGuard), "cudaMalloc");
  allocation_ = static_cast<std::byte*>(memory);
  first_ = allocation_ + kGuard + shift;
  if (const cudaError_t status = cudaMemset(memory, kPoison, kGuard + shift + bytes + kGuard);
      status != cudaSuccess) {
    cudaFree(memory);
    check(status, "cudaMemset");
  }
}

DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept
    : device_(other.device_),
      allocation_(std::exchange(other.allocation_, nullptr)),
      first_(other.first_),
      bytes_(other.bytes_) {}

DeviceMemory::~DeviceMemory() {
  if (allocation_ != nullptr) cudaFree(allocation_);
}

void DeviceMemory::write(std::span<const std::byte> from) {
  check(cudaMemcpy(first_, from.data(), from.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
}

void DeviceMemory::read(std::span<std::byte> into) const {
  wait_for(device_);
  check(cudaMemcpy(into.data(), first_, into.size(), cudaMemcpyDeviceToHost), "cudaMemcpy");
}

bool DeviceMemory::guards_untouched() const {
  wait_for(device_);
  const auto untouched = [](const std::byte* from, std::size_t bytes) {
    std::vector<std::byte> guard(bytes);
    check(cudaMemcpy(guard.data(), from, bytes, cudaMemcpyDeviceToHost), "cudaMemcpy");
    return std::all_of(guard.begin(), guard.end(),
                       [](std::byte b) { return b == std::byte{kPoison}; });
  };
  return untouched(allocation_, static_cast<std::size_t>(first_ - allocation_)) &&
         untouched(first_ + bytes_, kGuard);
}

}  // namespace lln::conformance
