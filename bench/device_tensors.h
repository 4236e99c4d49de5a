// Memory of a device for the tensors of a problem, and two small kernels that measuring needs.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <vector>

#include "bench/tensor_memory.h"

namespace lln::bench {

// Throws lln::Error: out_of_memory or device.
void check_cuda(cudaError_t status, const char* what);

class DeviceTensors final : public TensorMemory {
 public:
  explicit DeviceTensors(Device device) : device_(device) {}
  ~DeviceTensors() override;
  DeviceTensors(const DeviceTensors&) = delete;
  DeviceTensors& operator=(const DeviceTensors&) = delete;

  using TensorMemory::zeros;
  std::span<std::byte> zeros(std::size_t bytes) override;
  ConstView gaussian(DType dtype, const Shape& shape) override;
  void write(std::span<std::byte> to, std::span<const std::byte> from) override;
  Device device() const override { return device_; }
  std::size_t bytes() const { return bytes_; }  // handed out so far

 private:
  Device device_;
  std::vector<void*> memory_;
  std::size_t bytes_ = 0;
};

// Keeps the stream busy for so long, while the host puts more work behind it.
void wait_on_device(double seconds, cudaStream_t stream);

}  // namespace lln::bench
