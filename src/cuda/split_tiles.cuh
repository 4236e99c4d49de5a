// f32 matrices in shared memory as three tiles of bf16 (mma.cuh: tile_offset), one behind the
// other, or two where that is enough, and products with them. A tile can be read by rows and by
// columns, so that one copy of a matrix serves products with it and with its transpose.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/split_mma.cuh"

namespace lln::cuda {

template <int kRows, int kWidth>
inline constexpr int kSplitPart = kRows* kWidth * 2;
template <int kRows, int kWidth, int kParts = 3>
inline constexpr int kSplitBytes = kParts* kSplitPart<kRows, kWidth>;

// Four 8 x 8 matrices of each part; with kTransposed each is read by columns.
template <int kPart, bool kTransposed, int kParts>
__device__ inline void load_split(std::uint32_t (&x)[kParts][4], std::uint32_t address) {
#pragma unroll
  for (int part = 0; part < kParts; ++part) {
    if constexpr (kTransposed) {
      load_transposed(x[part], address + part * kPart);
    } else {
      load_matrices(x[part], address + part * kPart);
    }
  }
}

// The same as a left operand.
template <int kPart, bool kTransposed, int kParts>
__device__ inline void load_split(SplitIn<kParts> (&a)[4], std::uint32_t address) {
  std::uint32_t x[kParts][4];
  load_split<kPart, kTransposed>(x, address);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) a[i].part[part] = x[part][i];
  }
}

// From an f32 matrix [channel, column] whose rows are aligned to 8 bytes; zeros past `depth` and
// `width`, multiples of 8. Row 8 n + g of the tile is the channel of column g of the n-th result in
// direct order, and the columns follow each other in the order kColumns.
template <int kWidth, Columns kColumns>
__device__ inline void fill_split_tile(unsigned char* tile, const float* matrix,
                                       std::int64_t row_stride, int depth, int width) {
  constexpr int kPieces = kWidth / 8;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < kWidth * kPieces;
       i += static_cast<int>(blockDim.x)) {
    const int row = i / kPieces, piece = i % kPieces;
    const int channel = column_channel<Columns::direct>(row / 8, row % 8);
    Split words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int column = column_channel<kColumns>(piece, 2 * j);
      float2 x = {0, 0};
      if (channel < depth && column < width) {
        x = *reinterpret_cast<const float2*>(matrix + channel * row_stride + column);
      }
      words[j] = split(x.x, x.y);
    }
#pragma unroll
    for (int part = 0; part < 3; ++part) {
      *reinterpret_cast<uint4*>(tile + part * kSplitPart<kWidth, kWidth> +
                                tile_offset<kWidth>(row, piece)) = {
          words[0].part[part], words[1].part[part], words[2].part[part], words[3].part[part]};
    }
  }
}

// 16 rows of 32 channels into a tile of kRows rows, from row `first` and channel 32 slice on;
// columns in natural order.
template <int kRows, int kWidth, int kParts = 3>
__device__ inline void write_split_rows(unsigned char* tile, int first, int slice,
                                        const RowFloats<32>& x) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    SplitIn<kParts> words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = split<kParts>(x[0][half][2 * i], x[0][half][2 * i + 1]);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      *reinterpret_cast<uint4*>(tile + part * kSplitPart<kRows, kWidth> +
                                tile_offset<kWidth>(first + g + 8 * half, 4 * slice + t)) = {
          words[0].part[part], words[1].part[part], words[2].part[part], words[3].part[part]};
    }
  }
}

// acc += a b for 16 channels of the sum, the step-th ones of a tile of kRows x kWidth, and 8 kCount
// results from 8 `first` on: those are columns of the tile or, where kTransposed, its rows.
template <int kWidth, bool kTransposed, int kRows = kWidth, int kParts = 3, int kCount, int kLeft>
__device__ inline void multiply_split_step(float (&acc)[kCount][4], const SplitIn<kLeft> (&a)[4],
                                           const unsigned char* tile, int step, int first) {
  const int lane = threadIdx.x & 31, low = lane & 7;
  const int middle = (lane >> 3) & 1, high = lane >> 4;
  const std::uint32_t base = shared_address(tile);
#pragma unroll
  for (int n = 0; n < kCount / 2; ++n) {
    const int result = first + 2 * n + high, sum = 2 * step + middle;
    __syncwarp();  // else the compiler fills registers with what later turns need
    const std::uint32_t offset = kTransposed ? tile_offset<kWidth>(8 * result + low, sum)
                                             : tile_offset<kWidth>(8 * sum + low, result);
    std::uint32_t b[kParts][4];
    load_split<kSplitPart<kRows, kWidth>, !kTransposed>(b, base + offset);
    mma_split(acc[2 * n], a, b, 0);
    mma_split(acc[2 * n + 1], a, b, 2);
  }
}

// acc += x y or, where kTransposed, x y^T, for rows first .. + 15 of a tile of kRows x kWidth and
// results as in multiply_split_step.
template <int kRows, int kWidth, bool kTransposed, int kOtherRows = kWidth, int kParts = 3,
          int kCount>
__device__ inline void multiply_split_rows(float (&acc)[kCount][4], const unsigned char* x,
                                           int first, const unsigned char* y, int result) {
  const int lane = threadIdx.x & 31;
#pragma unroll 1  // more steps at a time would fill registers that there are not
  for (int step = 0; step < kWidth / 16; ++step) {
    SplitIn<kParts> a[4];
    load_split<kSplitPart<kRows, kWidth>, false>(
        a, shared_address(x) + tile_offset<kWidth>(first + (lane & 15), 2 * step + (lane >> 4)));
    multiply_split_step<kWidth, kTransposed, kOtherRows, kParts>(acc, a, y, step, result);
  }
}

// The left operand whose rows are channels `channel` .. + 15 of a tile and whose sums go over its
// rows `first` .. + 15.
template <int kRows, int kWidth, int kParts>
__device__ inline void load_split_channels(SplitIn<kParts> (&a)[4], const unsigned char* tile,
                                           int channel, int first) {
  const int lane = threadIdx.x & 31;
  load_split<kSplitPart<kRows, kWidth>, true>(
      a, shared_address(tile) + tile_offset<kWidth>(first + 8 * (lane >> 4) + (lane & 7),
                                                    channel / 8 + ((lane >> 3) & 1)));
}

// sums += a y for rows `first` .. + 15 of a tile. The tensor core cuts its sums off: those of 16
// rows are added to those of all rows before by ordinary additions.
template <int kRows, int kWidth, int kParts>
__device__ inline void add_split_rows(float (&sums)[kWidth / 8][4], const SplitIn<kParts> (&a)[4],
                                      const unsigned char* y, int first) {
  const int lane = threadIdx.x & 31, row = first + 8 * ((lane >> 3) & 1) + (lane & 7);
#pragma unroll
  for (int n = 0; n < kWidth / 16; ++n) {
    __syncwarp();  // as in multiply_split_step
    std::uint32_t b[kParts][4];
    load_split<kSplitPart<kRows, kWidth>, true>(
        b, shared_address(y) + tile_offset<kWidth>(row, 2 * n + (lane >> 4)));
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      float sum[4] = {};
      mma_split(sum, a, b, 2 * i);
#pragma unroll
      for (int j = 0; j < 4; ++j) sums[2 * n + i][j] += sum[j];
    }
  }
}

// 16 x 8 kCount results as they are into a tile of kRows x kWidth, from row `first` and column
// 8 `piece` on.
template <int kRows, int kWidth, int kParts = 3, int kCount>
__device__ inline void write_split_results(unsigned char* tile, int first, int piece,
                                           const float (&x)[kCount][4]) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < 2 * kCount; ++i) {
    const auto words = split<kParts>(x[i / 2][2 * (i % 2)], x[i / 2][2 * (i % 2) + 1]);
    const std::uint32_t at =
        tile_offset<kWidth>(first + (lane >> 2) + 8 * (i % 2), piece + i / 2) + 4 * (lane & 3);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      *reinterpret_cast<std::uint32_t*>(tile + part * kSplitPart<kRows, kWidth> + at) =
          words.part[part];
    }
  }
}

// acc += x * tile, or x * tile^T, for the group-th 32 channels of rows in registers; what is summed
// over lies in the tile in direct order.
template <int kWidth, bool kTransposed>
__device__ inline void multiply_split_group(float (&acc)[kWidth / 8][4], const float (&x)[2][8],
                                            const unsigned char* tile, int group) {
#pragma unroll
  for (int step = 0; step < 2; ++step) {
    Split a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* const pair = x[i % 2] + 4 * step + 2 * (i / 2);
      a[i] = split(pair[0], pair[1]);
    }
    multiply_split_step<kWidth, kTransposed>(acc, a, tile, 2 * group + step, 0);
  }
}

}  // namespace lln::cuda
