// The devices of this process: errors of the runtime as lln::Error, what a device can do, and the
// flag by which kernels report values that the host could not check.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "lln/tensor.h"

namespace lln::cuda {

// Throws Error(device), or Error(out_of_memory), with the runtime's own text, after clearing the
// runtime's sticky last error.
void check(cudaError_t status, const char* what);
// After a launch.
inline void check_launch(const char* kernel) { check(cudaGetLastError(), kernel); }

// Makes a device current for a scope.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
};

// Why no kernel of this build runs on a device: no driver, no such device, or a compute capability
// that the build has no code for. Empty when they do. Asked once per device and remembered.
std::string device_refusal(int index);
int multiprocessors(int index);
int compute_capability(int index);  // 90 for 9.0

// Where kernels report bad values: memory of the host that a device can write, one word per device.
// Zero: nothing to report.
enum class DeviceFault : std::uint32_t {
  none = 0,
  key_lengths = 1,   // an entry is not in [0, tokens_k]
  cu_seqlens_q = 2,  // does not start at 0, decreases, or does not end at the number of tokens
  cu_seqlens_k = 4,
  different_cu_seqlens = 8,  // causal or block-diagonal with other keys than queries
};
std::uint32_t* fault_word(int index);  // as the device sees it
// Throws Error(invalid_argument) about faults that earlier calls on this device left, and forgets
// them. Does not wait: a call that is still under way may report later.
void throw_reported_faults(int index);

}  // namespace lln::cuda
