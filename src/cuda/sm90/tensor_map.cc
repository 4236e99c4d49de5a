// The driver's encoder of tensor maps, found at run time: the library does not link to the driver.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/tensor_map.h"

#include <algorithm>

namespace lln::cuda::sm90 {
namespace {

struct TensorShape {
  std::int64_t batch = 0, heads = 0, tokens = 0, dim = 0;
};

using Encode = decltype(&cuTensorMapEncodeTiled);

Encode find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  constexpr unsigned kSinceCuda = 12000;
  if (cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, kSinceCuda,
                                       cudaEnableDefault, &found) != cudaSuccess) {
    cudaGetLastError();
    return nullptr;
  }
  return found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

bool make_tensor_map(CUtensorMap& map, const Rows& rows, const TensorShape& shape) {
  static const Encode encode = find_encoder();
  if (encode == nullptr) return false;
  if (shape.tokens == 0) return true;
  constexpr cuuint32_t kBox[] = {64, 64, 1, 1};
  constexpr cuuint32_t kSteps[] = {1, 1, 1, 1};
  const auto size = [](std::int64_t x) { return static_cast<cuuint64_t>(x); };
  const cuuint64_t sizes[] = {size(shape.dim), size(shape.tokens), size(shape.heads),
                              size(shape.batch)};
  // The stride of a dimension of size 1 may be anything; the engine wants a sensible one.
  constexpr cuuint64_t kElement = 2;
  const cuuint64_t least = (size(shape.dim) * kElement + 15) / 16 * 16;
  const auto stride = [&](std::int64_t elements, std::int64_t count) {
    return count > 1 ? size(elements) * kElement : least;
  };
  const cuuint64_t strides[] = {stride(rows.token, shape.tokens), stride(rows.head, shape.heads),
                                stride(rows.batch, shape.batch)};
  return encode(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, rows.data, sizes, strides, kBox, kSteps,
                CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS;
}

}  // namespace

bool make_tensor_maps(TensorMaps& maps, const DeviceCall& call, std::int64_t batch, Op op) {
  const std::int64_t tokens = call.sequences.tokens, tokens_k = call.sequences.tokens_k;
  if (batch == 0 || call.heads == 0 || call.heads_k == 0) return false;
  const TensorShape q{batch, call.heads, tokens, call.dim},
      o{batch, call.heads, tokens, call.dim_v};
  const TensorShape k{batch, call.heads_k, tokens_k, call.dim},
      v{batch, call.heads_k, tokens_k, call.dim_v};
  const bool made = make_tensor_map(maps.q, call.q, q) && make_tensor_map(maps.k, call.k, k) &&
                    make_tensor_map(maps.v, call.v, v);
  if (op == Op::forward) return made && make_tensor_map(maps.o, call.o, o);
  return made && make_tensor_map(maps.g, call.g, o) && make_tensor_map(maps.dq, call.dq, q) &&
         make_tensor_map(maps.dk, call.dk, k) && make_tensor_map(maps.dv, call.dv, v);
}

}  // namespace lln::cuda::sm90
