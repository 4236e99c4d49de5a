// What the kernels of decoding share: the call, numbers of any type as f32, exponents in units of
// log2, and how many tokens a sequence adds.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/device.h"
#include "cuda/device_call.h"
#include "cuda/warp.cuh"
#include "math/feature_map.h"
#include "math/state.h"

namespace lln::cuda {

struct DecodeCall {
  DeviceCall call;
  DecodeShape shape;
  float* state;          // slots of math/state.h
  std::int64_t* tokens;  // [slots]: that each has seen
  const void* lengths;   // key_lengths, or null: every sequence adds all tokens
  bool wide_lengths;
  bool rows;  // q and o are given
  std::uint32_t* faults;
};

inline DecodeCall make_decode_call(const Call& call) {
  const Problem& p = call.problem;
  const IndexView& lengths = call.in.key_lengths;
  return {make_device_call(call),
          DecodeShape(p.dim, p.dim_v, p.has_diag() ? p.diag_block : 0),
          call.state,
          call.slot_tokens,
          lengths.given() ? lengths.data : nullptr,
          lengths.wide,
          call.in.q.given(),
          fault_word(p.device.index)};
}

#ifdef __CUDACC__

inline constexpr float kLog2OfE = 1.4426950408889634F;

// A number of any type as its bits: a load that no branch stands before, so that many are under way
// at once. bits_number() makes f32 of it.
__device__ inline std::uint32_t load_bits(const Rows& rows, DType dtype, std::int64_t at) {
  return dtype == DType::f32 ? static_cast<const std::uint32_t*>(rows.data)[at]
                             : static_cast<const std::uint16_t*>(rows.data)[at];
}

__device__ inline float bits_number(std::uint32_t bits, DType dtype) {
  if (dtype == DType::f16) return __half2float(__ushort_as_half(static_cast<unsigned short>(bits)));
  return __uint_as_float(dtype == DType::f32 ? bits : bits << 16);
}

__device__ inline float load_number(const Rows& rows, DType dtype, std::int64_t at) {
  return bits_number(load_bits(rows, dtype, at), dtype);
}

__device__ inline void store_number(const Rows& rows, DType dtype, std::int64_t at, float x) {
  switch (dtype) {
    case DType::f16:
      static_cast<__half*>(rows.data)[at] = __float2half_rn(x);
      return;
    case DType::bf16:
      static_cast<__nv_bfloat16*>(rows.data)[at] = __float2bfloat16_rn(x);
      return;
    default:
      static_cast<float*>(rows.data)[at] = x;
  }
}

__device__ inline std::int64_t row_at(const Rows& rows, std::int64_t b, std::int64_t h,
                                      std::int64_t n) {
  return b * rows.batch + h * rows.head + n * rows.token;
}

// f(scale x) in units of log2.
__device__ inline float exponent(const DeviceCall& call, float scale, float x) {
  if (call.feature == Feature::exp) return clamp_exponent(x * (scale * kLog2OfE));
  return log_feature(call.feature, call.power, clamp_exponent(x * scale)).value * kLog2OfE;
}

// How many tokens a sequence adds. A length out of range is cut to what the tensors hold, and
// reported.
__device__ inline std::int64_t added_tokens(const DecodeCall& c, std::int64_t sequence) {
  const std::int64_t most = c.call.sequences.tokens_k;
  if (c.lengths == nullptr) return most;
  const std::int64_t length = c.wide_lengths
                                  ? static_cast<const std::int64_t*>(c.lengths)[sequence]
                                  : static_cast<const std::int32_t*>(c.lengths)[sequence];
  if (length >= 0 && length <= most) return length;
  if (threadIdx.x == 0) atomicOr(c.faults, static_cast<std::uint32_t>(DeviceFault::key_lengths));
  return length < 0 ? 0 : most;
}

// The causal walks take no fewer tokens.
inline constexpr std::int64_t kShortestWalk = 64;

struct TokenRange {
  std::int64_t begin, end;
};

// The tokens that a walk takes of those that a slot adds: from the first border of diagonal blocks
// on. None where they are too few.
__device__ inline TokenRange walk_tokens(const DecodeCall& c, std::int64_t slot,
                                         std::int64_t added) {
  const std::int64_t block = c.shape.block;
  const std::int64_t over = block == 0 ? 0 : c.tokens[slot] % block;
  const std::int64_t lead = over == 0 ? 0 : block - over;
  return added - lead < kShortestWalk ? TokenRange{0, 0} : TokenRange{lead, added};
}

// Rows [begin, end) of a sequence become zero in all query heads of a key head.
__device__ inline void zero_rows(const DecodeCall& c, std::int64_t sequence, std::int64_t head_k,
                                 std::int64_t begin, std::int64_t end) {
  const std::int64_t group = c.call.heads / c.call.heads_k;
  for (std::int64_t g = 0; g < group && begin < end; ++g) {
    for (std::int64_t row = begin + threadIdx.x / 32; row < end; row += blockDim.x / 32) {
      const std::int64_t at = row_at(c.call.o, sequence, head_k * group + g, row);
      for (std::int64_t i = threadIdx.x % 32; i < c.shape.dv; i += 32) {
        store_number(c.call.o, c.call.dtype, at + i, 0);
      }
    }
  }
}

#endif

}  // namespace lln::cuda
