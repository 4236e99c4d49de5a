// Allocation, Gaussian numbers from a hash of their place, and a kernel that only waits.
// SPDX-License-Identifier: Apache-2.0
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <string>

#include "bench/device_tensors.h"
#include "lln/error.h"

namespace lln::bench {
namespace {

__device__ std::uint64_t mixed(std::uint64_t x) {  // the finaliser of splitmix64
  x += 0x9E3779B97F4A7C15U;
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9U;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBU;
  return x ^ (x >> 31);
}

template <class T>
__device__ T stored(float x) {
  return static_cast<T>(x);
}
template <>
__device__ __half stored<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __nv_bfloat16 stored<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

template <class T>
__global__ void gaussian_kernel(T* to, std::size_t count, std::uint64_t seed) {
  const std::size_t threads = static_cast<std::size_t>(gridDim.x) * blockDim.x;
  for (std::size_t i = static_cast<std::size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += threads) {
    const std::uint64_t bits = mixed(mixed(seed) ^ i);
    const float first = (static_cast<float>(bits >> 40) + 0.5F) * 0x1p-24F;
    const float second = static_cast<float>((bits >> 8) & 0xFFFFFFU) * 0x1p-24F;
    to[i] = stored<T>(sqrtf(-2 * logf(first)) * cospif(2 * second));
  }
}

template <class T>
void fill(void* to, std::size_t count, std::uint64_t seed) {
  if (count == 0) return;
  constexpr int kThreads = 256;
  constexpr int kBlocks = 4096;
  gaussian_kernel<<<kBlocks, kThreads>>>(static_cast<T*>(to), count, seed);
  check_cuda(cudaGetLastError(), "gaussian_kernel");
}

__device__ std::uint64_t nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
  return now;
}

__global__ void wait_kernel(std::uint64_t duration) {
  const std::uint64_t start = nanoseconds();
  while (nanoseconds() - start < duration) __nanosleep(500);
}

}  // namespace

void check_cuda(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  throw Error(status == cudaErrorMemoryAllocation ? ErrorCode::out_of_memory : ErrorCode::device,
              std::string(what) + ": " + cudaGetErrorString(status));
}

DeviceTensors::~DeviceTensors() {
  for (void* memory : memory_) cudaFree(memory);
}

std::span<std::byte> DeviceTensors::zeros(std::size_t bytes) {
  // Never null, because a null pointer means "not given" to the library.
  const std::size_t taken = bytes == 0 ? 1 : bytes;
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, taken), "cudaMalloc");
  memory_.push_back(memory);
  bytes_ += bytes;
  check_cuda(cudaMemset(memory, 0, taken), "cudaMemset");
  return {static_cast<std::byte*>(memory), bytes};
}

ConstView DeviceTensors::gaussian(DType dtype, const Shape& shape) {
  const std::span<std::byte> memory = zeros(bytes_of(dtype, shape));
  const std::size_t count = memory.size() / size_of(dtype);
  const std::uint64_t seed = memory_.size();
  switch (dtype) {
    case DType::f16:
      fill<__half>(memory.data(), count, seed);
      break;
    case DType::bf16:
      fill<__nv_bfloat16>(memory.data(), count, seed);
      break;
    case DType::f32:
      fill<float>(memory.data(), count, seed);
      break;
    case DType::f64:
      fill<double>(memory.data(), count, seed);
      break;
  }
  check_cuda(cudaDeviceSynchronize(), "gaussian_kernel");
  return on(device_, view(static_cast<const void*>(memory.data()), dtype, shape));
}

void DeviceTensors::write(std::span<std::byte> to, std::span<const std::byte> from) {
  check_cuda(cudaMemcpy(to.data(), from.data(), from.size(), cudaMemcpyHostToDevice), "cudaMemcpy");
}

void wait_on_device(double seconds, cudaStream_t stream) {
  wait_kernel<<<1, 1, 0, stream>>>(static_cast<std::uint64_t>(seconds * 1e9));
  check_cuda(cudaGetLastError(), "wait_kernel");
}

}  // namespace lln::bench
