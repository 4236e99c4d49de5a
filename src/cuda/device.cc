// What is known about the devices, found once for each, and the words in which they report faults.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/device.h"

#include <fmt/format.h>

#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "lln/error.h"

namespace lln::cuda {
namespace {

// Finding these allocates and loads code, which a stream capture of this thread would forbid. They
// are no part of what is captured.
class OutsideCapture {
 public:
  OutsideCapture() { exchange(); }
  ~OutsideCapture() { exchange(); }
  OutsideCapture(const OutsideCapture&) = delete;
  OutsideCapture& operator=(const OutsideCapture&) = delete;

 private:
  void exchange() {
    // Fails where there is no driver, and then there is no capture.
    if (cudaThreadExchangeStreamCaptureMode(&mode_) != cudaSuccess) cudaGetLastError();
  }
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

struct Facts {
  std::once_flag once;
  std::string refusal;
  int multiprocessors = 0;
  int shared_memory = 0;
  int code_version = 0;
  int capability = 0;
  std::uint32_t* word = nullptr;  // one address for host and device
};

constexpr int kMostDevices = 64;

std::string no_code_text(int capability) {
  return fmt::format("compute capability {}.{}: this build has code for {}", capability / 10,
                     capability % 10, architectures());
}

void find_facts(int index, Facts& facts) {
  const OutsideCapture outside;
  const int count = device_count(facts.refusal);
  if (!facts.refusal.empty()) return;
  if (index < 0 || index >= count) {
    facts.refusal = fmt::format("there is no device {}: this machine has {}", index, count);
    return;
  }
  int major = 0, minor = 0;
  try {
    const CurrentDevice current(index);
    const auto attribute = [&](cudaDeviceAttr which, int& value) {
      check(cudaDeviceGetAttribute(&value, which, index), "cudaDeviceGetAttribute");
    };
    attribute(cudaDevAttrComputeCapabilityMajor, major);
    attribute(cudaDevAttrComputeCapabilityMinor, minor);
    attribute(cudaDevAttrMultiProcessorCount, facts.multiprocessors);
    attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, facts.shared_memory);
    facts.capability = 10 * major + minor;
    if (const cudaError_t status = find_code(facts.code_version);
        status == cudaErrorNoKernelImageForDevice) {
      cudaGetLastError();
      facts.refusal = no_code_text(facts.capability);
      return;
    } else {
      check(status, "cudaFuncGetAttributes");
    }
    void* word = nullptr;
    check(cudaHostAlloc(&word, sizeof(std::uint32_t), cudaHostAllocPortable | cudaHostAllocMapped),
          "cudaHostAlloc");
    facts.word = static_cast<std::uint32_t*>(word);
    std::atomic_ref(*facts.word).store(0);
  } catch (const Error& error) {
    facts.refusal = error.what();
  }
}

const Facts& facts_of(int index) {
  static std::array<Facts, kMostDevices> all;
  static Facts none;
  const bool possible = index >= 0 && index < kMostDevices;
  Facts& facts = possible ? all[static_cast<std::size_t>(index)] : none;
  std::call_once(facts.once, [&] { find_facts(possible ? index : kMostDevices, facts); });
  return facts;
}

}  // namespace

void check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  cudaGetLastError();
  const bool memory = status == cudaErrorMemoryAllocation;
  throw Error(
      memory ? ErrorCode::out_of_memory : ErrorCode::device,
      fmt::format("{}: {} ({})", what, cudaGetErrorString(status), cudaGetErrorName(status)));
}

int device_count(std::string& why_none) {
  int count = 0, driver = 0;
  const cudaError_t status = cudaGetDeviceCount(&count);
  if (status == cudaSuccess && count > 0) return count;
  cudaGetLastError();
  // Without any driver the runtime says that it is too old.
  const bool none = cudaDriverGetVersion(&driver) == cudaSuccess && driver == 0;
  why_none = std::string("no CUDA device can be used: ") +
             (none ? "there is no driver" : cudaGetErrorString(status));
  return 0;
}

CurrentDevice::CurrentDevice(int index) {
  check(cudaGetDevice(&before_), "cudaGetDevice");
  if (index == before_) return;
  check(cudaSetDevice(index), "cudaSetDevice");
  changed_ = true;
}

CurrentDevice::~CurrentDevice() {
  // What fails here failed before, and was reported then.
  if (changed_ && cudaSetDevice(before_) != cudaSuccess) cudaGetLastError();
}

std::string device_refusal(int index) { return facts_of(index).refusal; }

int multiprocessors(int index) { return facts_of(index).multiprocessors; }

int shared_memory(int index) { return facts_of(index).shared_memory; }

bool can_overlap(int index) {
  return facts_of(index).capability >= 90 && facts_of(index).code_version >= 90;
}

bool has_sm90a_code(int index) {
  return std::string_view(architectures()).find("90a") != std::string_view::npos &&
         facts_of(index).capability == 90 && facts_of(index).code_version == 90;
}

int compute_capability(int index) { return facts_of(index).capability; }

std::uint32_t* fault_word(int index) { return facts_of(index).word; }

void throw_reported_faults(int index) {
  std::uint32_t* const word = fault_word(index);
  if (word == nullptr || std::atomic_ref(*word).load(std::memory_order_relaxed) == 0) return;
  const std::uint32_t found = std::atomic_ref(*word).exchange(0);
  constexpr std::array<std::pair<DeviceFault, const char*>, 4> kTexts = {{
      {DeviceFault::key_lengths,
       "an entry of key_lengths is below 0 or above the number of tokens"},
      {DeviceFault::cu_seqlens_q,
       "cu_seqlens_q does not start at 0, decreases, or does not end at the number of tokens"},
      {DeviceFault::cu_seqlens_k,
       "cu_seqlens_k does not start at 0, decreases, or does not end at the number of tokens"},
      {DeviceFault::different_cu_seqlens,
       "cu_seqlens_q and cu_seqlens_k differ, but causal and block-diagonal attention need as many "
       "keys as queries"},
  }};
  std::vector<const char*> texts;
  for (const auto& [fault, text] : kTexts) {
    if ((found & static_cast<std::uint32_t>(fault)) != 0) texts.push_back(text);
  }
  throw Error(ErrorCode::invalid_argument,
              fmt::format("an earlier call on {} was given bad values, and its outputs are "
                          "worthless: {}; this call was not begun",
                          to_string(cuda_device(index)), fmt::join(texts, "; ")));
}

}  // namespace lln::cuda
