// torch's allocator, and Linux.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/peak_memory.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <malloc.h>
#include <sys/resource.h>

#include <fstream>
#include <string>

namespace lln_torch {

std::int64_t peak_memory(const c10::Device& device) {
  if (device.is_cuda()) {
    const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
    return stats.allocated_bytes[0].peak;  // 0: of all pools together
  }
  std::ifstream status("/proc/self/status");
  for (std::string word; status >> word;) {
    std::int64_t kilobytes = 0;
    if (word == "VmHWM:" && status >> kilobytes) return 1024 * kilobytes;
  }
  struct rusage usage {};
  ::getrusage(RUSAGE_SELF, &usage);
  return std::int64_t{1024} * usage.ru_maxrss;
}

bool reset_peak_memory(const c10::Device& device) {
  if (device.is_cuda()) {
    c10::getDeviceAllocator(device.type())->resetPeakStats(device.index());
    return true;
  }
  std::ofstream file("/proc/self/clear_refs");
  file << "5" << std::flush;  // proc(5): the peak begins anew
  return file.good();
}

void release_cached_memory(const c10::Device& device) {
  if (device.is_cuda()) {
    c10::getDeviceAllocator(device.type())->emptyCache();
  } else {
    ::malloc_trim(0);
  }
}

}  // namespace lln_torch
