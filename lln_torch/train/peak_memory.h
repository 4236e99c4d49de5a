// How much memory a process takes, on a device or on the CPU.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <c10/core/Device.h>

#include <cstdint>

namespace lln_torch {

// The most memory that this process held at once since reset_peak_memory(): what torch's allocator
// gave out on a CUDA device, the resident set on the CPU.
std::int64_t peak_memory(const c10::Device& device);
// False where the system does not let a process begin anew.
bool reset_peak_memory(const c10::Device& device);
// Gives back what torch's allocator keeps for later.
void release_cached_memory(const c10::Device& device);

}  // namespace lln_torch
