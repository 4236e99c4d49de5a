// How sums over pieces of keys are joined: by their masses, piece after piece, so that the bits do
// not depend on who does it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_keys.cuh"

namespace lln::cuda {

// Sums of pieces for four columns of one channel, with their reference exponent.
struct Joined {
  float m = kNoExponent, mass = 0;
  float4 values = {0, 0, 0, 0};
};

__device__ inline void scale_sums(Joined& sums, float factor) {
  sums.mass *= factor;
  sums.values.x *= factor;
  sums.values.y *= factor;
  sums.values.z *= factor;
  sums.values.w *= factor;
}

// `values` are averages of the mass where kAverages, sums otherwise. References are equal nearly
// always (0), and then nothing is rescaled.
template <bool kAverages>
__device__ inline void add_sums(Joined& sums, float m, float mass, const float4& values) {
  float factor = 1;
  if (m != sums.m) {
    const float top = fmaxf(m, sums.m);
    scale_sums(sums, exp2f(sums.m - top));
    factor = exp2f(m - top);
    sums.m = top;
  }
  const float weight = kAverages ? mass * factor : factor;
  sums.mass = fmaf(mass, factor, sums.mass);
  sums.values.x = fmaf(weight, values.x, sums.values.x);
  sums.values.y = fmaf(weight, values.y, sums.values.y);
  sums.values.z = fmaf(weight, values.z, sums.values.z);
  sums.values.w = fmaf(weight, values.w, sums.values.w);
}

// (c, C) from the sums of all pieces. single: the average of the only piece, which is that of the
// sequence to the last bit.
__device__ inline void write_joined(const TiledCall& tiled, const Joined& sums, std::int64_t s,
                                    std::int64_t head, std::int64_t channel, int column,
                                    const float* single) {
  const float inverse = sums.mass == 0 ? 0 : 1 / sums.mass;
  if (column == 0) {
    tiled.state.c_at(s, head)[channel] =
        sums.mass == 0 ? -INFINITY : (sums.m + log2f(sums.mass)) * kLn2;
  }
  *reinterpret_cast<float4*>(tiled.state.values_at(s, head) + channel * tiled.state.row + column) =
      single != nullptr ? *reinterpret_cast<const float4*>(single)
                        : float4{sums.values.x * inverse, sums.values.y * inverse,
                                 sums.values.z * inverse, sums.values.w * inverse};
}

}  // namespace lln::cuda
