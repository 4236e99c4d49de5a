// The devices of this process as kernels see them: errors of the runtime as lln::Error, what a
// device can do, and the flag by which kernels report values that the host could not check.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/host.h"
#include "lln/tensor.h"

namespace lln::cuda {

// Throws Error(device), or Error(out_of_memory), with the runtime's own text, after clearing the
// runtime's sticky last error.
void check(cudaError_t status, const char* what);

// How many devices there are, and why there are none.
int device_count(std::string& why_none);

const char* architectures();  // that this build has code for
int multiprocessors(int index);
int shared_memory(int index);       // bytes that a block may have
int compute_capability(int index);  // 90 for 9.0
// Whether kernels may overlap (launch.h): the device can, and the code that it runs knows how to
// wait, which code compiled for older devices does not.
bool can_overlap(int index);
// Whether this build has code for sm_90a and the device runs it.
bool has_sm90a_code(int index);

// Where kernels report bad values: memory of the host that a device can write, one word per device.
// Zero: nothing to report. Kernels set bits by atomicOr.
enum class DeviceFault : std::uint32_t {
  none = 0,
  key_lengths = 1,   // an entry is not in [0, tokens_k]
  cu_seqlens_q = 2,  // does not start at 0, decreases, or does not end at the number of tokens
  cu_seqlens_k = 4,
  different_cu_seqlens = 8,  // causal or block-diagonal with other keys than queries
};
std::uint32_t* fault_word(int index);  // as the device sees it

// Whether this build has code for the current device, asked of the smallest kernel there is, and
// the compute capability that this code was compiled for.
cudaError_t find_code(int& version);

}  // namespace lln::cuda
