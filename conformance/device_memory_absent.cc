// A build without CUDA has no device memory; nothing here is reached, since it has no device
// either.
// SPDX-License-Identifier: Apache-2.0
#include "conformance/device_memory.h"
#include "lln/error.h"

namespace lln::conformance {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::unsupported, "this build has no memory on CUDA devices");
}

}  // namespace

DeviceMemory::DeviceMemory(Device, std::size_t, std::size_t) { refuse(); }
DeviceMemory::DeviceMemory(DeviceMemory&& other) noexcept : device_(other.device_) {}
DeviceMemory::~DeviceMemory() = default;
void DeviceMemory::write(std::span<const std::byte>) { refuse(); }
void DeviceMemory::read(std::span<std::byte>) const { refuse(); }
bool DeviceMemory::guards_untouched() const { refuse(); }

}  // namespace lln::conformance
