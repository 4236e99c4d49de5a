// Products of f32 matrices on the tensor core, to f32 accuracy: each number is the sum of three
// bf16 ones, 8 bits each, and of the nine products of parts the six that reach 2^-24 are taken. f16
// numbers have two parts, and four products.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiles.cuh"

namespace lln::cuda {

// Words of two bf16 numbers each, whose sums are x and y.
template <int kParts>
struct SplitIn {
  std::uint32_t part[kParts];
};
using Split = SplitIn<3>;

template <int kParts = 3>
__device__ inline SplitIn<kParts> split(float x, float y) {
  SplitIn<kParts> words;
#pragma unroll
  for (int i = 0; i < kParts; ++i) {
    words.part[i] = pack<Bf16>(x, y);
    const float2 taken = unpack<Bf16>(words.part[i]);
    x -= taken.x;
    y -= taken.y;
  }
  return words;
}

// d += a b. The tensor core cuts off what does not fit behind its sum, each time in the same
// direction, so that all products but the largest are summed apart, the smallest first, and added
// by an ordinary addition.
template <int kLeft, int kRight>
__device__ inline void mma_split(float (&d)[4], const SplitIn<kLeft> (&a)[4],
                                 const std::uint32_t (&b0)[kRight],
                                 const std::uint32_t (&b1)[kRight]) {
  float small[4] = {};
#pragma unroll
  for (int below = 2; below > 0; --below) {  // by 2^-8 each
#pragma unroll
    for (int x = below; x >= 0; --x) {
      const int y = below - x;
      if (x >= kLeft || y >= kRight) continue;
      mma<Bf16>(small, a[0].part[x], a[1].part[x], a[2].part[x], a[3].part[x], b0[y], b1[y]);
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) d[i] += small[i];
  mma<Bf16>(d, a[0].part[0], a[1].part[0], a[2].part[0], a[3].part[0], b0[0], b1[0]);
}

// The same with matrices `first` and the next one of four that were loaded together.
template <int kLeft, int kRight>
__device__ inline void mma_split(float (&d)[4], const SplitIn<kLeft> (&a)[4],
                                 const std::uint32_t (&b)[kRight][4], int first) {
  std::uint32_t b0[kRight], b1[kRight];
#pragma unroll
  for (int part = 0; part < kRight; ++part) {
    b0[part] = b[part][first];
    b1[part] = b[part][first + 1];
  }
  mma_split(d, a, b0, b1);
}

// Eight neighbouring numbers of a row.
__device__ inline void load_eight(float (&x)[8], const float* from) {
  const float4 low = *reinterpret_cast<const float4*>(from);
  const float4 high = *reinterpret_cast<const float4*>(from + 4);
  const float words[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = words[i];
}
__device__ inline void load_eight(float (&x)[8], const F16* from) {
  const uint4 words = *reinterpret_cast<const uint4*>(from);
  const std::uint32_t pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = unpack<F16>(pairs[i]);
    x[2 * i] = pair.x;
    x[2 * i + 1] = pair.y;
  }
}
// From four pairs that results have beside each other.
__device__ inline void store_eight(float* to, const float2 (&x)[4]) {
  *reinterpret_cast<float4*>(to) = {x[0].x, x[0].y, x[1].x, x[1].y};
  *reinterpret_cast<float4*>(to + 4) = {x[2].x, x[2].y, x[3].x, x[3].y};
}
__device__ inline void store_eight(F16* to, const float2 (&x)[4]) {
  *reinterpret_cast<uint4*>(to) = {pack<F16>(x[0].x, x[0].y), pack<F16>(x[1].x, x[1].y),
                                   pack<F16>(x[2].x, x[2].y), pack<F16>(x[3].x, x[3].y)};
}

// Rows g and g + 8 of 16 rows in direct order: [group of 32 channels][half][8 channels].
template <int kWidth>
using RowFloats = float[kWidth / 32][2][8];

// Zeros where not there(row), and from channel `dim` on.
template <int kWidth, class T, class There>
__device__ inline void load_float_rows_if(RowFloats<kWidth>& x, const T* rows, std::int64_t stride,
                                          int first, int dim, There&& there) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + g + 8 * half;
    const bool taken = there(row);
#pragma unroll
    for (int group = 0; group < kWidth / 32; ++group) {
      const int channel = 32 * group + 8 * t;
      if (taken && channel < dim) {
        load_eight(x[group][half], rows + row * stride + channel);
      } else {
#pragma unroll
        for (int i = 0; i < 8; ++i) x[group][half][i] = 0;
      }
    }
  }
}

template <int kWidth, class T>
__device__ inline void load_float_rows(RowFloats<kWidth>& x, const T* rows, std::int64_t stride,
                                       int first, int end, int dim) {
  load_float_rows_if<kWidth>(x, rows, stride, first, dim, [end](int row) { return row < end; });
}

// Results with columns in direct order.
template <int kWidth, class T>
__device__ inline void store_float_rows(T* rows, std::int64_t stride, int first, int end, int dim,
                                        const float (&acc)[kWidth / 8][4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + g + 8 * half;
#pragma unroll
    for (int group = 0; group < kWidth / 32; ++group) {
      const int channel = 32 * group + 8 * t;
      if (row >= end || channel >= dim) continue;
      float2 x[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        x[i] = {acc[4 * group + i][2 * half], acc[4 * group + i][2 * half + 1]};
      }
      store_eight(rows + row * stride + channel, x);
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
