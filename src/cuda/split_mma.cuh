// Products of f32 matrices on the tensor core, to f32 accuracy: each number is the sum of three
// bf16 ones, 8 bits each, and of the nine products of parts the six that reach 2^-24 are taken.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiles.cuh"

namespace lln::cuda {

// Three words of two bf16 numbers each, whose sums are x and y.
struct Split {
  std::uint32_t part[3];
};

__device__ inline Split split(float x, float y) {
  Split words;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    words.part[i] = pack<Bf16>(x, y);
    const float2 taken = unpack<Bf16>(words.part[i]);
    x -= taken.x;
    y -= taken.y;
  }
  return words;
}

// d += a b. The tensor core cuts off what does not fit behind its sum, each time in the same
// direction, so that the five small products are summed apart and added by an ordinary addition.
__device__ inline void mma_split(float (&d)[4], const Split (&a)[4], const std::uint32_t (&b0)[3],
                                 const std::uint32_t (&b1)[3]) {
  constexpr int kPairs[5][2] = {{2, 0}, {1, 1}, {0, 2}, {1, 0}, {0, 1}};
  float small[4] = {};
#pragma unroll
  for (int i = 0; i < 5; ++i) {
    const int x = kPairs[i][0], y = kPairs[i][1];
    mma<Bf16>(small, a[0].part[x], a[1].part[x], a[2].part[x], a[3].part[x], b0[y], b1[y]);
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] += small[i];
  mma<Bf16>(d, a[0].part[0], a[1].part[0], a[2].part[0], a[3].part[0], b0[0], b1[0]);
}

// Rows g and g + 8 of 16 rows in direct order: [group of 32 channels][half][8 channels].
template <int kWidth>
using RowFloats = float[kWidth / 32][2][8];

// Zeros where not there(row), and from channel `dim` on.
template <int kWidth, class There>
__device__ inline void load_float_rows_if(RowFloats<kWidth>& x, const float* rows,
                                          std::int64_t stride, int first, int dim, There&& there) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + g + 8 * half;
    const bool taken = there(row);
#pragma unroll
    for (int group = 0; group < kWidth / 32; ++group) {
      const int channel = 32 * group + 8 * t;
      float4 low = {0, 0, 0, 0}, high = low;
      if (taken && channel < dim) {
        const float* const from = rows + row * stride + channel;
        low = *reinterpret_cast<const float4*>(from);
        high = *reinterpret_cast<const float4*>(from + 4);
      }
      const float words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
      for (int i = 0; i < 8; ++i) x[group][half][i] = words[i];
    }
  }
}

template <int kWidth>
__device__ inline void load_float_rows(RowFloats<kWidth>& x, const float* rows, std::int64_t stride,
                                       int first, int end, int dim) {
  load_float_rows_if<kWidth>(x, rows, stride, first, dim, [end](int row) { return row < end; });
}

// Results with columns in direct order.
template <int kWidth>
__device__ inline void store_float_rows(float* rows, std::int64_t stride, int first, int end,
                                        int dim, const float (&acc)[kWidth / 8][4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + g + 8 * half;
#pragma unroll
    for (int group = 0; group < kWidth / 32; ++group) {
      const int channel = 32 * group + 8 * t;
      if (row >= end || channel >= dim) continue;
      float* const to = rows + row * stride + channel;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const float* const x = acc[4 * group + 2 * i] + 2 * half;
        const float* const y = acc[4 * group + 2 * i + 1] + 2 * half;
        *reinterpret_cast<float4*>(to + 4 * i) = {x[0], x[1], y[0], y[1]};
      }
    }
  }
}

// The three parts of an operand, one behind the other (OperandFill of tiles.cuh), with a factor for
// each column.
template <int kDepth, int kWidth, class Factor>
__device__ inline void fill_split_operand(uint4* operand, const float* matrix,
                                          std::int64_t row_stride, int depth, int width,
                                          Factor&& factor) {
  auto* const words = reinterpret_cast<std::uint32_t*>(operand);
  for (int i = static_cast<int>(threadIdx.x); i < kDepth * kWidth / 8;
       i += static_cast<int>(blockDim.x)) {
    const int pair = i % 16 + i / (4 * kWidth) * 16, column = i / 16 % (kWidth / 4) * 4;
    const int channel = 2 * pair;
    float4 low = {0, 0, 0, 0}, high = low;
    if (channel < depth && column < width) {
      low = *reinterpret_cast<const float4*>(matrix + channel * row_stride + column);
      high = *reinterpret_cast<const float4*>(matrix + (channel + 1) * row_stride + column);
    }
    const float x[4] = {low.x, low.y, low.z, low.w}, y[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const ColumnPlace place = column_place<Columns::direct>(column + j);
      const int at =
          ((channel / 32 * (kWidth / 8) + place.n) * 32 + 4 * place.g + channel % 32 / 8) * 4 +
          channel % 8 / 2;
      const float times = column < width ? factor(column + j) : 0;
      const Split parts = split(x[j] * times, y[j] * times);
#pragma unroll
      for (int part = 0; part < 3; ++part) {
        words[part * kOperandBytes<kDepth, kWidth> / 4 + at] = parts.part[part];
      }
    }
  }
}

// acc += x * operand.
template <int kDepth, int kWidth>
__device__ inline void multiply_split(float (&acc)[kWidth / 8][4], const RowFloats<kDepth>& x,
                                      const uint4* operand) {
  constexpr int kPart = kOperandBytes<kDepth, kWidth> / 16;
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int group = 0; group < kDepth / 32; ++group) {
    Split a[2][4];  // of the two steps of 16 channels
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        a[i / 2][half + 2 * (i % 2)] = split(x[group][half][2 * i], x[group][half][2 * i + 1]);
      }
    }
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
      uint4 b[3];
#pragma unroll
      for (int part = 0; part < 3; ++part) {
        b[part] = load_shared(operand + part * kPart + (group * (kWidth / 8) + n) * 32 + lane);
      }
      mma_split(acc[n], a[0], {b[0].x, b[1].x, b[2].x}, {b[0].y, b[1].y, b[2].y});
      mma_split(acc[n], a[1], {b[0].z, b[1].z, b[2].z}, {b[0].w, b[1].w, b[2].w});
    }
  }
}

}  // namespace lln::cuda
