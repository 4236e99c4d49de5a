// Rows of a tensor of any type in pieces that one thread takes at a time: 16 bytes where rows are
// whole pieces, single numbers where they are not.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <type_traits>

#include "cuda/device_call.h"
#include "cuda/mma.cuh"

namespace lln::cuda {

// Numbers [channel, channel + kCount) of a row.
template <class T, bool kWhole>
struct RowPiece {
  static constexpr int kCount = kWhole ? 16 / static_cast<int>(sizeof(T)) : 1;
  float x[kCount];

  __device__ static T* at(const Rows& rows, std::int64_t b, std::int64_t h, std::int64_t n,
                          int channel) {
    return static_cast<T*>(rows.data) + b * rows.batch + h * rows.head + n * rows.token + channel;
  }

  __device__ void load(const T* from) {
    if constexpr (std::is_same_v<T, float>) {
      if constexpr (kWhole) {
        const float4 words = *reinterpret_cast<const float4*>(from);
        x[0] = words.x, x[1] = words.y, x[2] = words.z, x[3] = words.w;
      } else {
        x[0] = *from;
      }
    } else if constexpr (kWhole) {
      const uint4 all = *reinterpret_cast<const uint4*>(from);
      const std::uint32_t words[4] = {all.x, all.y, all.z, all.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 pair = unpack<T>(words[i]);
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
      }
    } else {
      x[0] = unpack<T>(*reinterpret_cast<const std::uint16_t*>(from)).x;
    }
  }

  __device__ void store(T* to) const {
    if constexpr (std::is_same_v<T, float>) {
      if constexpr (kWhole) {
        *reinterpret_cast<float4*>(to) = {x[0], x[1], x[2], x[3]};
      } else {
        *to = x[0];
      }
    } else if constexpr (kWhole) {
      *reinterpret_cast<uint4*>(to) = {pack<T>(x[0], x[1]), pack<T>(x[2], x[3]),
                                       pack<T>(x[4], x[5]), pack<T>(x[6], x[7])};
    } else {
      *reinterpret_cast<std::uint16_t*>(to) = static_cast<std::uint16_t>(pack<T>(x[0], 0));
    }
  }
};

}  // namespace lln::cuda
