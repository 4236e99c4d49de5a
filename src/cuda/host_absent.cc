// The answers of a build without CUDA. No kernel of it takes tensors on a device, so that nothing
// is ever asked for memory or made current.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/decode.h"
#include "cuda/host.h"
#include "cuda/kernels.h"
#include "cuda/moments.h"
#include "lln/error.h"

namespace lln {

std::vector<Kernel> cuda_forward_kernels() { return {}; }
std::vector<Kernel> cuda_backward_kernels() { return {}; }
std::vector<Kernel> cuda_append_kernels() { return {}; }
std::vector<Kernel> cuda_step_kernels() { return {}; }

namespace cuda {
namespace {

[[noreturn]] void refuse() {
  throw Error(ErrorCode::unsupported, "this build has no CUDA: " + absence());
}

}  // namespace

std::string absence() { return LLN_CUDA_REASON; }

BuildInfo::Cuda describe() { return {}; }

std::string device_refusal(int) { return "this build has no CUDA: " + absence(); }

CurrentDevice::CurrentDevice(int) { refuse(); }
CurrentDevice::~CurrentDevice() = default;

Scratch::Scratch(std::size_t, void*) { refuse(); }
Scratch::~Scratch() = default;

void throw_reported_faults(int) { refuse(); }

void decode_clear(const DecodeShape&, const DecodeSlots&, std::int64_t, std::int64_t, void*) {
  refuse();
}
void decode_merge(const DecodeShape&, const DecodeSlots&, const DecodeSlots&, std::int64_t, void*) {
  refuse();
}
void copy_on_device(void*, const void*, std::size_t, void*) { refuse(); }
void copy_to_host(void*, const void*, std::size_t, void*) { refuse(); }
void copy_from_host(void*, const void*, std::size_t, void*) { refuse(); }

std::size_t matching_workspace(const Problem&) { refuse(); }
void match_none(const MatchingCall&, const MatchingOutputs&) { refuse(); }
void match_frozen(const MatchingCall&, const MatchingOutputs&) { refuse(); }
void match_per_head(const MatchingCall&, const MatchingOutputs&, const MatchingRule&) { refuse(); }
void match_paper(const MatchingCall&, const MatchingOutputs&, const MatchingRule&) { refuse(); }
void match_running(const MatchingCall&, const MatchingOutputs&, const MatchingRule&,
                   const DeviceRunningMoments&) {
  refuse();
}
void update_running(const MatchingCall&, const DeviceRunningMoments&) { refuse(); }
void sum_heads(const MatchingCall&, std::span<Moments>) { refuse(); }

}  // namespace cuda
}  // namespace lln
