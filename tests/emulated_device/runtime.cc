// The part of the CUDA runtime and the driver that the library and its tests use, with one device:
// memory is that of the host, and everything is done when it is asked for, or kept where a stream
// is being captured.
// SPDX-License-Identifier: Apache-2.0
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>
#include <vector>

namespace {

std::mutex one_kernel;

void release(void* memory) {
  {
    const std::lock_guard lock(one_kernel);
    emulated::forget_device_memory(memory);
  }
  std::free(memory);
}
// What was asked for is over before what comes next.
void end_kernels() {
  const std::lock_guard lock(one_kernel);
  emulated::end_order_of_kernels();
}

}  // namespace

// What a stream was asked for while it was captured.
struct Captured {
  std::vector<std::function<void()>> nodes;
  std::vector<void*> memory;
  Captured() = default;
  Captured(const Captured&) = delete;
  Captured& operator=(const Captured&) = delete;
  ~Captured() {
    for (void* const each : memory) release(each);
  }
};
struct EmulatedGraph {  // and the programs made of it
  std::shared_ptr<Captured> captured;
};
struct EmulatedStream {
  std::shared_ptr<Captured> captured;
};

namespace {

// Few, so that blocks have several items, and that heads are fewer and more than these.
constexpr int kMultiprocessors = 4;
constexpr std::size_t kMemory = std::size_t{1} << 32;
constexpr int kMostShared = 227 * 1024, kSharedWithoutAsking = 48 * 1024;
std::map<const void*, int> shared_limits;  // of kernels that asked for more

cudaError_t allocate(void** memory, std::size_t bytes) {
  constexpr std::size_t kAlignment = 256;
  if (bytes > kMemory) return cudaErrorMemoryAllocation;
  // Not a byte more, so that a sanitizer sees what is read behind it.
  if (posix_memalign(memory, kAlignment, std::max<std::size_t>(bytes, 1)) != 0) {
    return cudaErrorMemoryAllocation;
  }
  std::memset(*memory, 0xFF, bytes);  // NaN in every type
  const std::lock_guard lock(one_kernel);
  emulated::know_device_memory(*memory, bytes);
  return cudaSuccess;
}

bool capturing(cudaStream_t stream) { return stream != nullptr && stream->captured != nullptr; }

cudaError_t run(cudaStream_t stream, std::function<void()> node) {
  if (capturing(stream)) {
    stream->captured->nodes.push_back(std::move(node));
  } else {
    node();
  }
  return cudaSuccess;
}

}  // namespace

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "out of memory" : "invalid argument";
}
const char* cudaGetErrorName(cudaError_t error) {
  return error == cudaErrorMemoryAllocation ? "cudaErrorMemoryAllocation" : "cudaErrorInvalidValue";
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  *version = 13000;
  return cudaSuccess;
}
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int device) { return device == 0 ? cudaSuccess : cudaErrorInvalidValue; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr which, int) {
  switch (which) {
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
      *value = kMostShared;
      break;
    case cudaDevAttrComputeCapabilityMajor:
      *value = 9;
      break;
    case cudaDevAttrComputeCapabilityMinor:
      *value = 0;
      break;
    case cudaDevAttrMultiProcessorCount:
      *value = kMultiprocessors;
      break;
  }
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {"emulated device", 9, 0, kMultiprocessors, kMemory};
  return cudaSuccess;
}
cudaError_t cudaDeviceSynchronize() {
  end_kernels();
  return cudaSuccess;
}
cudaError_t cudaStreamCreate(cudaStream_t* stream) {
  *stream = new EmulatedStream;
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t stream) {
  delete stream;
  return cudaSuccess;
}
cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
  if (capturing(stream)) return cudaErrorStreamCaptureUnsupported;
  end_kernels();
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t stream, cudaStreamCaptureMode) {
  stream->captured = std::make_shared<Captured>();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t* graph) {
  *graph = new EmulatedGraph{std::exchange(stream->captured, nullptr)};
  return cudaSuccess;
}
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* program, cudaGraph_t graph, unsigned long long) {
  *program = new EmulatedGraph{*graph};
  return cudaSuccess;
}
cudaError_t cudaGraphLaunch(cudaGraphExec_t program, cudaStream_t) {
  for (const auto& node : program->captured->nodes) node();
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t program) { return cudaGraphDestroy(program); }
cudaError_t cudaGraphDestroy(cudaGraph_t graph) {
  delete graph;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) { return cudaSuccess; }
cudaError_t cudaMalloc(void** memory, std::size_t bytes) { return allocate(memory, bytes); }
cudaError_t cudaFree(void* memory) {
  release(memory);
  return cudaSuccess;
}
cudaError_t cudaMallocAsync(void** memory, std::size_t bytes, cudaStream_t stream) {
  const cudaError_t status = allocate(memory, bytes);
  if (status == cudaSuccess && capturing(stream)) stream->captured->memory.push_back(*memory);
  return status;
}
cudaError_t cudaFreeAsync(void* memory, cudaStream_t stream) {
  return capturing(stream) ? cudaSuccess : cudaFree(memory);
}
cudaError_t cudaHostAlloc(void** memory, std::size_t bytes, unsigned) {
  return allocate(memory, bytes);
}
cudaError_t cudaMemcpy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind) {
  if (bytes > 0) std::memmove(to, from, bytes);
  end_kernels();
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  return run(stream, [=] { cudaMemcpy(to, from, bytes, kind); });
}
cudaError_t cudaMemset(void* to, int value, std::size_t bytes) {
  if (bytes > 0) std::memset(to, value, bytes);
  end_kernels();
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* to, int value, std::size_t bytes, cudaStream_t stream) {
  return run(stream, [=] { cudaMemset(to, value, bytes); });
}

cudaError_t cudaFuncSetAttribute(const void* kernel, cudaFuncAttribute, int value) {
  if (value > kMostShared) return cudaErrorInvalidValue;
  const std::lock_guard lock(one_kernel);
  shared_limits[kernel] = value;
  return cudaSuccess;
}
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {90, 90};
  return cudaSuccess;
}
cudaError_t emulated::launch(const cudaLaunchConfig_t& config, const void* kernel,
                             std::function<void()> thread) {
  {
    const std::lock_guard lock(one_kernel);
    const auto found = shared_limits.find(kernel);
    const int limit = found == shared_limits.end() ? kSharedWithoutAsking : found->second;
    if (config.gridDim.x == 0 || config.blockDim.x == 0 || config.blockDim.x > 1024 ||
        config.dynamicSmemBytes > static_cast<std::size_t>(limit)) {
      return cudaErrorInvalidValue;
    }
  }
  const bool overlapping = config.numAttrs > 0;
  return run(config.stream, [=] {
    const std::lock_guard lock(one_kernel);
    run_grid(config.gridDim.x, config.blockDim.x, config.dynamicSmemBytes, overlapping, thread);
  });
}

cudaError_t cudaGetDriverEntryPointByVersion(const char* name, void** function, unsigned,
                                             unsigned long long,
                                             cudaDriverEntryPointQueryResult* found) {
  const bool known = std::string_view(name) == "cuTensorMapEncodeTiled";
  *function = known ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  *found = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}

CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* data,
                                const cuuint64_t* sizes, const cuuint64_t* strides,
                                const cuuint32_t* box, const cuuint32_t* steps,
                                CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                                CUtensorMapFloatOOBfill) {
  // What load_box() and store_box() know; the enumerations have no other values here.
  const bool known = box[0] == 64 && sizes[0] % 8 == 0 && box[1] <= 256 && box[2] == 1 &&
                     box[3] == 1 &&
                     std::all_of(steps, steps + 4, [](cuuint32_t step) { return step == 1; });
  if (!known || rank != 4 || reinterpret_cast<std::uintptr_t>(data) % 16 != 0)
    return CUDA_ERROR_INVALID_VALUE;
  *map = {static_cast<unsigned char*>(data), {}, {2}, {}};
  for (int i = 0; i < 4; ++i) {
    if (sizes[i] == 0 || (i > 0 && strides[i - 1] % 16 != 0)) return CUDA_ERROR_INVALID_VALUE;
    map->sizes[i] = sizes[i];
    map->box[i] = box[i];
    if (i > 0) map->strides[i] = strides[i - 1];
  }
  return CUDA_SUCCESS;
}
