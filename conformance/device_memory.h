// Memory of a CUDA device that knows when somebody writes beside it. The one place of the case
// table that calls the CUDA runtime; device_memory_absent.cc stands in for it in builds without
// CUDA.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>

#include "lln/tensor.h"

namespace lln::conformance {

class DeviceMemory {
 public:
  // Every byte 0xFF, the guards before and behind included. The first byte lies `shift` bytes past
  // a multiple of 256. Throws Error where there is no such device or not so much memory.
  DeviceMemory(Device device, std::size_t bytes, std::size_t shift = 0);
  ~DeviceMemory();
  DeviceMemory(DeviceMemory&& other) noexcept;
  DeviceMemory(const DeviceMemory&) = delete;
  DeviceMemory& operator=(const DeviceMemory&) = delete;

  std::byte* data() const { return first_; }
  std::size_t size() const { return bytes_; }
  std::span<std::byte> span() const { return {first_, bytes_}; }  // not to be read from here
  void write(std::span<const std::byte> from);
  // Both wait until the device has done all that it was given.
  void read(std::span<std::byte> into) const;
  bool guards_untouched() const;

 private:
  Device device_;
  std::byte* allocation_ = nullptr;
  std::byte* first_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace lln::conformance
