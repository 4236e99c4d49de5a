// Rows of a tensor of any type in neighbouring numbers that one thread takes at a time: 16 bytes
// where the number of channels is a multiple of 8, else one. That depends on the number alone, so
// that sums have one order wherever a tensor starts; how 16 bytes are read does not.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "cuda/device_call.h"
#include "cuda/mma.cuh"

namespace lln::cuda {

template <class T>
__device__ inline float load_number(const T* from) {
  if constexpr (std::is_same_v<T, float>) {
    return *from;
  } else {
    return unpack<T>(*reinterpret_cast<const std::uint16_t*>(from)).x;
  }
}
template <class T>
__device__ inline void store_number(T* to, float x) {
  if constexpr (std::is_same_v<T, float>) {
    *to = x;
  } else {
    *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(pack<T>(x, 0));
  }
}

template <class T>
__device__ inline T* row_at(const Rows& rows, std::int64_t b, std::int64_t h, std::int64_t n,
                            int channel) {
  return static_cast<T*>(rows.data) + b * rows.batch + h * rows.head + n * rows.token + channel;
}

// kWhole: 16 bytes. `aligned`: they begin at multiples of 16.
template <class T, bool kWhole>
struct RowPiece {
  static constexpr int kCount = kWhole ? 16 / static_cast<int>(sizeof(T)) : 1;
  float x[kCount];

  __device__ void load(const T* from, bool aligned) {
    if (!kWhole || !aligned) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = load_number(from + i);
    } else if constexpr (std::is_same_v<T, float>) {
      const float4 words = *reinterpret_cast<const float4*>(from);
      const float all[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = all[i];
    } else if constexpr (kWhole) {
      const uint4 all = *reinterpret_cast<const uint4*>(from);
      const std::uint32_t words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack<T>(words[i]);
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
      }
    }
  }

  __device__ void store(T* to, bool aligned) const {
    if (!kWhole || !aligned) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) store_number(to + i, x[i]);
    } else if constexpr (kWhole && std::is_same_v<T, float>) {
      *reinterpret_cast<float4*>(to) = {x[0], x[1], x[2], x[3]};
    } else if constexpr (kWhole) {
      *reinterpret_cast<uint4*>(to) = {pack<T>(x[0], x[1]), pack<T>(x[2], x[3]),
                                       pack<T>(x[4], x[5]), pack<T>(x[6], x[7])};
    }
  }
};

}  // namespace lln::cuda
