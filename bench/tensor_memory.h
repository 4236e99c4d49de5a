// Memory for the tensors of a problem, in the host or on a device: Gaussian numbers, zeros, and
// small lists. All of it exists and is filled before anything is timed.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "io/bytes.h"
#include "lln/exec.h"
#include "lln/tensor.h"

namespace lln::bench {

// What it hands out lives as long as it does.
class TensorMemory {
 public:
  virtual ~TensorMemory() = default;
  virtual std::span<std::byte> zeros(std::size_t bytes) = 0;
  // No two tensors are alike.
  virtual ConstView gaussian(DType dtype, const Shape& shape) = 0;
  virtual void write(std::span<std::byte> to, std::span<const std::byte> from) = 0;
  virtual Device device() const = 0;

  View zeros(DType dtype, const Shape& shape);
  ConstView numbers(DType dtype, const Shape& shape, std::span<const float> values);
  IndexView list(std::span<const std::int64_t> values);
};

// Throws std::bad_alloc where the number does not fit.
std::size_t bytes_of(DType dtype, const Shape& shape);

// The Gaussian numbers are a block of a prime number of them, made once and repeated: no two rows
// of a tensor are alike, and a gigabyte is filled as fast as it is copied.
class HostMemory final : public TensorMemory {
 public:
  explicit HostMemory(Parallel& threads) : threads_(threads) {}
  using TensorMemory::zeros;
  std::span<std::byte> zeros(std::size_t bytes) override;
  ConstView gaussian(DType dtype, const Shape& shape) override;
  void write(std::span<std::byte> to, std::span<const std::byte> from) override;
  Device device() const override { return {}; }

 private:
  Parallel& threads_;
  std::vector<io::Bytes> memory_;
};

}  // namespace lln::bench
