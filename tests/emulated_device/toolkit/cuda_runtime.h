// Stands in for the toolkit's header where kernels are compiled for the host: the language's words,
// its functions, and the part of the runtime that the library and its tests use.
// SPDX-License-Identifier: Apache-2.0
#pragma once

// Headers of the standard library that use a word below as an attribute come first.
#include <math.h>

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>

#include "emulated_device/block.h"

#define __CUDACC__
#define __host__
#define __device__
#define __global__
#define __shared__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)
#define __noinline__ __attribute__((noinline))
#define __CUDA_ARCH_FEAT_SM90_ALL

// For what is done beside the threads: its accesses to memory are told of by touch(), if at all.
#define EMULATED_BESIDE __attribute__((no_sanitize("thread")))

struct dim3 : emulated::Dim {
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : Dim{x_, y_, z_} {}
};
struct alignas(8) float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

// --- functions of the language

template <class T>
constexpr T min(T x, T y) {
  return y < x ? y : x;
}
template <class T>
constexpr T max(T x, T y) {
  return x < y ? y : x;
}
inline float rsqrtf(float x) { return 1 / sqrtf(x); }
inline float __fdividef(float x, float y) {
  return fabsf(y) > 0x1p126F && isfinite(y) ? 0 : x / y;  // as the device does
}
inline float __uint_as_float(unsigned x) { return std::bit_cast<float>(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }

template <class T>
void __stcs(T* to, T x) {
  *to = x;
}

// Have an order among themselves; other accesses before them must be over.
template <class T>
EMULATED_BESIDE T atomicOr(T* at, T x) {
  emulated::touch(at, sizeof *at, {});
  const T before = *at;
  *at |= x;
  return before;
}
template <class T>
EMULATED_BESIDE T atomicMin(T* at, T x) {
  emulated::touch(at, sizeof *at, {});
  const T before = *at;
  *at = std::min(before, x);
  return before;
}
template <class T>
EMULATED_BESIDE T atomicMax(T* at, T x) {
  emulated::touch(at, sizeof *at, {});
  const T before = *at;
  *at = std::max(before, x);
  return before;
}

inline void __syncthreads() { emulated::meet(0, 0); }
inline int __syncthreads_or(int x) { return emulated::meet(0, 0, x != 0).any ? 1 : 0; }
inline int __syncthreads_and(int x) { return emulated::meet(0, 0, x != 0).all ? 1 : 0; }

namespace emulated {

// The lane `from` has what this one gets; whole warps alone.
template <class T>
T exchanged(const char* instruction, T x, unsigned from) {
  struct Lane {
    T given;
    unsigned from;
    T got;
  } own{x, from < kLanes ? from : current->lane, {}};
  together(instruction, &own, [](const Operands& lanes) EMULATED_BESIDE {
    for (void* const each : lanes) {
      auto& lane = *static_cast<Lane*>(each);
      lane.got = static_cast<const Lane*>(lanes[lane.from])->given;
    }
  });
  return own.got;
}

inline std::uint32_t ballot(const char* instruction, bool own) {
  struct Lane {
    bool given;
    std::uint32_t got;
  } lane{own, 0};
  together(instruction, &lane, [](const Operands& lanes) EMULATED_BESIDE {
    std::uint32_t all = 0;
    for (unsigned i = 0; i < kLanes; ++i) {
      all |= std::uint32_t{static_cast<const Lane*>(lanes[i])->given} << i;
    }
    for (void* const each : lanes) static_cast<Lane*>(each)->got = all;
  });
  return lane.got;
}

inline void check_lanes(unsigned mask) {
  if (mask != ~0U) fault("some lanes of a warp alone: not emulated");
}

}  // namespace emulated

template <class T>
T __shfl_sync(unsigned mask, T x, int lane) {
  emulated::check_lanes(mask);
  return emulated::exchanged("shfl", x, static_cast<unsigned>(lane) % emulated::kLanes);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int lanes) {
  emulated::check_lanes(mask);
  return emulated::exchanged("shfl.xor", x, emulated::current->lane ^ static_cast<unsigned>(lanes));
}
template <class T>
T __shfl_down_sync(unsigned mask, T x, unsigned lanes) {
  emulated::check_lanes(mask);
  return emulated::exchanged("shfl.down", x, emulated::current->lane + lanes);
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, unsigned lanes) {
  emulated::check_lanes(mask);
  return emulated::exchanged("shfl.up", x, emulated::current->lane - lanes);
}
inline unsigned __ballot_sync(unsigned mask, int x) {
  emulated::check_lanes(mask);
  return emulated::ballot("vote.ballot", x != 0);
}
inline int __all_sync(unsigned mask, int x) {
  emulated::check_lanes(mask);
  return emulated::ballot("vote.all", x != 0) == ~0U ? 1 : 0;
}
inline int __any_sync(unsigned mask, int x) {
  emulated::check_lanes(mask);
  return emulated::ballot("vote.any", x != 0) != 0 ? 1 : 0;
}
inline void __syncwarp(unsigned mask = ~0U) {
  emulated::check_lanes(mask);
  emulated::meet_warp();
}

// --- the runtime

enum cudaError_t : int {
  cudaSuccess = 0,
  cudaErrorInvalidValue = 1,
  cudaErrorMemoryAllocation = 2,
  cudaErrorNoKernelImageForDevice = 209,
  cudaErrorStreamCaptureUnsupported = 900,
};
using cudaStream_t = struct EmulatedStream*;
enum cudaMemcpyKind {
  cudaMemcpyHostToDevice,
  cudaMemcpyDeviceToHost,
  cudaMemcpyDeviceToDevice,
};
enum cudaDeviceAttr {
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMultiProcessorCount,
};
struct cudaDeviceProp {
  char name[256];
  int major, minor, multiProcessorCount;
  std::size_t totalGlobalMem;
};
struct cudaFuncAttributes {
  int ptxVersion, binaryVersion;
};
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaStreamCaptureMode {
  cudaStreamCaptureModeGlobal,
  cudaStreamCaptureModeRelaxed,
};
inline constexpr unsigned cudaHostAllocPortable = 1, cudaHostAllocMapped = 2;

const char* cudaGetErrorString(cudaError_t error);
const char* cudaGetErrorName(cudaError_t error);
cudaError_t cudaGetLastError();
cudaError_t cudaGetDeviceCount(int* count);
cudaError_t cudaDriverGetVersion(int* version);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int device);
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device);
cudaError_t cudaDeviceSynchronize();
cudaError_t cudaStreamCreate(cudaStream_t* stream);
cudaError_t cudaStreamDestroy(cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
using cudaGraph_t = struct EmulatedGraph*;
using cudaGraphExec_t = struct EmulatedGraph*;
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode mode);
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph);
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* program, cudaGraph_t graph,
                                 unsigned long long flags = 0);
cudaError_t cudaGraphLaunch(cudaGraphExec_t program, cudaStream_t stream);
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t program);
cudaError_t cudaGraphDestroy(cudaGraph_t graph);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);
cudaError_t cudaMalloc(void** memory, std::size_t bytes);
cudaError_t cudaFree(void* memory);
cudaError_t cudaMallocAsync(void** memory, std::size_t bytes, cudaStream_t stream);
cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream);
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned flags);
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind);
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream);
cudaError_t cudaMemset(void* to, int value, std::size_t bytes);
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream);
template <class T>
cudaError_t cudaMalloc(T** memory, std::size_t bytes) {
  return cudaMalloc(reinterpret_cast<void**>(memory), bytes);
}

enum cudaLaunchAttributeID { cudaLaunchAttributeProgrammaticStreamSerialization };
struct cudaLaunchAttribute {
  cudaLaunchAttributeID id;
  struct {
    int programmaticStreamSerializationAllowed;
  } val;
};
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
  cudaLaunchAttribute* attrs = nullptr;
  unsigned numAttrs = 0;
};

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute which, int value);
template <class... Parameters>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), cudaFuncAttribute which,
                                 int value) {
  return cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), which, value);
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* kernel);
template <class... Parameters>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, void (*kernel)(Parameters...)) {
  return cudaFuncGetAttributes(attributes, reinterpret_cast<const void*>(kernel));
}

namespace emulated {

cudaError_t launch(const cudaLaunchConfig_t& config, const void* kernel,
                   std::function<void()> thread);

}  // namespace emulated
template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const std::tuple<Parameters...> given{arguments...};
  return emulated::launch(*config, reinterpret_cast<const void*>(kernel),
                          [=] { std::apply(kernel, given); });
}

// --- the driver's entry points

enum cudaDriverEntryPointQueryResult {
  cudaDriverEntryPointSuccess,
  cudaDriverEntryPointSymbolNotFound,
};
inline constexpr unsigned long long cudaEnableDefault = 0;
cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* found);
