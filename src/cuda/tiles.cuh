// Rows in registers and matrices that stay in shared memory, laid out so that the products read and
// write whole 16-byte pieces of the caller's rows without passing through shared memory.
//
// A warp holds 16 rows. In every group of 32 channels lane (g, t) = (lane / 4, lane % 4) holds
// channels 8 t .. 8 t + 7 of rows g and g + 8: one 16-byte load each ("direct" order). The order of
// channels inside a sum is free, so these words are the tensor core's left operand as they are, if
// the right operand lists its channels in the same order; and where the right operand lists its
// columns in that order too, the results are again 8 neighbouring channels a lane.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/mma.cuh"

namespace lln::cuda {

// Words of 16 rows: [group of 32 channels][rows g, g + 8][pairs of channels].
template <int kWidth>
using RowWords = std::uint32_t[kWidth / 32][2][4];

// Reads rows `first` + g and + 8, zeros from row `end` and channel `dim` (a multiple of 8) on.
template <int kWidth, class T>
__device__ inline void load_rows(RowWords<kWidth>& x, const T* rows, std::int64_t stride, int first,
                                 int end, int dim) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const bool whole = first + 16 <= end && dim == kWidth;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + g + 8 * half;
    const T* const from = rows + row * stride + 8 * t;
#pragma unroll
    for (int group = 0; group < kWidth / 32; ++group) {
      uint4 words = {0, 0, 0, 0};
      if (whole || (row < end && 32 * group + 8 * t < dim)) {
        words = *reinterpret_cast<const uint4*>(from + 32 * group);
      }
      x[group][half][0] = words.x;
      x[group][half][1] = words.y;
      x[group][half][2] = words.z;
      x[group][half][3] = words.w;
    }
  }
}

// Rows first + g and + 8 of a tile in shared memory.
template <int kWidth>
__device__ inline void read_rows(RowWords<kWidth>& x, const unsigned char* tile, int first) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int group = 0; group < kWidth / 32; ++group) {
      const uint4 words = *reinterpret_cast<const uint4*>(
          tile + tile_offset<kWidth>(first + g + 8 * half, 4 * group + t));
      x[group][half][0] = words.x;
      x[group][half][1] = words.y;
      x[group][half][2] = words.z;
      x[group][half][3] = words.w;
    }
  }
}

template <int kWidth>
__device__ inline void copy_rows(RowWords<kWidth>& to, const RowWords<kWidth>& from) {
#pragma unroll
  for (int group = 0; group < kWidth / 32; ++group) {
#pragma unroll
    for (int i = 0; i < 8; ++i) to[group][i / 4][i % 4] = from[group][i / 4][i % 4];
  }
}

template <int kWidth>
__device__ inline void write_rows(unsigned char* tile, int first, const RowWords<kWidth>& x) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int group = 0; group < kWidth / 32; ++group) {
      *reinterpret_cast<uint4*>(tile + tile_offset<kWidth>(first + g + 8 * half, 4 * group + t)) = {
          x[group][half][0], x[group][half][1], x[group][half][2], x[group][half][3]};
    }
  }
}

// Results of a product with columns in direct order, as rows of the caller's type.
template <int kWidth, class T>
__device__ inline void store_rows(T* rows, std::int64_t stride, int first, int end, int dim,
                                  const float (&acc)[kWidth / 8][4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const bool whole = first + 16 <= end && dim == kWidth;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + g + 8 * half;
    T* const to = rows + row * stride + 8 * t;
#pragma unroll
    for (int group = 0; group < kWidth / 32; ++group) {
      uint4 words;
      words.x = pack<T>(acc[4 * group][2 * half], acc[4 * group][2 * half + 1]);
      words.y = pack<T>(acc[4 * group + 1][2 * half], acc[4 * group + 1][2 * half + 1]);
      words.z = pack<T>(acc[4 * group + 2][2 * half], acc[4 * group + 2][2 * half + 1]);
      words.w = pack<T>(acc[4 * group + 3][2 * half], acc[4 * group + 3][2 * half + 1]);
      if (whole || (row < end && 32 * group + 8 * t < dim)) {
        *reinterpret_cast<uint4*>(to + 32 * group) = words;
      }
    }
  }
}

// The channel of column g of the n-th 8-column result.
enum class Columns { direct, natural };
template <Columns kColumns>
__device__ inline int column_channel(int n, int g) {
  if constexpr (kColumns == Columns::natural) return 8 * n + g;
  return 32 * (n / 4) + 8 * (g >> 1) + 2 * (n & 3) + (g & 1);
}
// Its inverse.
struct ColumnPlace {
  int n, g;
};
template <Columns kColumns>
__device__ inline ColumnPlace column_place(int channel) {
  if constexpr (kColumns == Columns::natural) return {channel / 8, channel % 8};
  return {channel / 32 * 4 + channel % 8 / 2, channel % 32 / 8 * 2 + channel % 2};
}

// A right operand of kDepth (summed over) x kWidth in shared memory, in the order in which the
// lanes read it: 16 bytes a lane are 8 neighbouring channels of the sum for one column.
template <int kDepth, int kWidth>
inline constexpr int kOperandBytes = kDepth* kWidth * 2;

// From an f32 matrix [channel, column] whose rows are aligned to 16 bytes, times
// factor(channel, column); zeros past `depth` and `width`, multiples of 8. All kThreads threads of
// the block take part, in two steps, so that the matrix is on its way while the factors are found.
// A lane takes two rows at four columns: half a warp fills 16 banks.
template <class T, int kDepth, int kWidth, int kThreads>
class OperandFill {
 public:
  __device__ OperandFill(const float* matrix, std::int64_t row_stride, int depth, int width) {
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const float4 zeros = {0, 0, 0, 0};
      rows_[i][0] = rows_[i][1] = zeros;
      if (channel(i) < depth && column(i) < width) {
        const float* const from = matrix + channel(i) * row_stride + column(i);
        rows_[i][0] = *reinterpret_cast<const float4*>(from);
        rows_[i][1] = *reinterpret_cast<const float4*>(from + row_stride);
      }
    }
  }

  template <Columns kColumns, class Factor>
  __device__ void write(uint4* operand, Factor&& factor) const {
    auto* const words = reinterpret_cast<std::uint32_t*>(operand);
#pragma unroll
    for (int i = 0; i < kItems; ++i) {
      const int first = channel(i);
      const float4 &low = rows_[i][0], &high = rows_[i][1];
      const float x[4] = {low.x, low.y, low.z, low.w}, y[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const ColumnPlace place = column_place<kColumns>(column(i) + j);
        const int at =
            ((first / 32 * (kWidth / 8) + place.n) * 32 + 4 * place.g + first % 32 / 8) * 4 +
            first % 8 / 2;
        words[at] =
            pack<T>(x[j] * factor(first, column(i) + j), y[j] * factor(first + 1, column(i) + j));
      }
    }
  }

 private:
  static constexpr int kItems = kDepth * kWidth / 8 / kThreads;
  static_assert(kItems * kThreads * 8 == kDepth * kWidth);

  __device__ static int item(int i) { return static_cast<int>(threadIdx.x) + i * kThreads; }
  __device__ static int channel(int i) { return 2 * (item(i) % 16 + item(i) / (4 * kWidth) * 16); }
  __device__ static int column(int i) { return item(i) / 16 % (kWidth / 4) * 4; }

  float4 rows_[kItems][2];
};

// The same from [column, channel].
template <class T, int kDepth, int kWidth, Columns kColumns, class Factor>
__device__ inline void fill_operand_transposed(uint4* operand, const float* matrix,
                                               std::int64_t row_stride, int depth, int width,
                                               Factor&& factor) {
  for (int i = static_cast<int>(threadIdx.x); i < kDepth * kWidth / 8;
       i += static_cast<int>(blockDim.x)) {
    const int lane = i & 31, n = (i >> 5) % (kWidth / 8), group = (i >> 5) / (kWidth / 8);
    const int channel = 32 * group + 8 * (lane & 3);
    const int column = column_channel<kColumns>(n, lane >> 2);
    float4 low = {0, 0, 0, 0}, high = {0, 0, 0, 0};
    if (channel < depth && column < width) {
      const float* const from = matrix + column * row_stride + channel;
      low = *reinterpret_cast<const float4*>(from);
      high = *reinterpret_cast<const float4*>(from + 4);
    }
    const float x[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    std::uint32_t words[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      words[j] = pack<T>(x[2 * j] * factor(channel + 2 * j, column),
                         x[2 * j + 1] * factor(channel + 2 * j + 1, column));
    }
    operand[i] = {words[0], words[1], words[2], words[3]};
  }
}

// acc += x * operand.
template <class T, int kDepth, int kWidth>
__device__ inline void multiply(float (&acc)[kWidth / 8][4], const RowWords<kDepth>& x,
                                const uint4* operand) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int group = 0; group < kDepth / 32; ++group) {
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
      const uint4 b = load_shared(operand + (group * (kWidth / 8) + n) * 32 + lane);
      mma<T>(acc[n], x[group][0][0], x[group][1][0], x[group][0][1], x[group][1][1], b.x, b.y);
      mma<T>(acc[n], x[group][0][2], x[group][1][2], x[group][0][3], x[group][1][3], b.z, b.w);
    }
  }
}

// acc += rows first .. + 15 of a tile * operand.
template <class T, int kDepth, int kWidth>
__device__ inline void multiply_rows(float (&acc)[kWidth / 8][4], const unsigned char* tile,
                                     int first, const uint4* operand) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int group = 0; group < kDepth / 32; ++group) {
    const uint4 x =
        *reinterpret_cast<const uint4*>(tile + tile_offset<kDepth>(first + g, 4 * group + t));
    const uint4 y =
        *reinterpret_cast<const uint4*>(tile + tile_offset<kDepth>(first + g + 8, 4 * group + t));
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
      const uint4 b = load_shared(operand + (group * (kWidth / 8) + n) * 32 + lane);
      mma<T>(acc[n], x.x, y.x, x.y, y.y, b.x, b.y);
      mma<T>(acc[n], x.z, y.z, x.w, y.w, b.z, b.w);
    }
  }
}

// sum[0], sum[2]: rows g and g + 8 of x times a vector, 8 neighbouring channels of which lie in
// vector[channel / 8]. The tensor core adds what the lanes of a row would have to exchange.
template <class T, int kDepth>
__device__ inline void multiply_vector(float (&sum)[4], const RowWords<kDepth>& x,
                                       const uint4* vector) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int group = 0; group < kDepth / 32; ++group) {
    const uint4 b = load_shared(vector + 4 * group + t);
    mma<T>(sum, x[group][0][0], x[group][1][0], x[group][0][1], x[group][1][1], b.x, b.y);
    mma<T>(sum, x[group][0][2], x[group][1][2], x[group][0][3], x[group][1][3], b.z, b.w);
  }
}

// acc += x * tile^T for 8 * kCount rows of a tile in shared memory: column j is row j of the tile.
template <class T, int kDepth, int kCount>
__device__ inline void multiply_by_rows(float (&acc)[kCount][4], const RowWords<kDepth>& x,
                                        const unsigned char* tile) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int group = 0; group < kDepth / 32; ++group) {
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const uint4 b =
          *reinterpret_cast<const uint4*>(tile + tile_offset<kDepth>(8 * n + g, 4 * group + t));
      mma<T>(acc[n], x[group][0][0], x[group][1][0], x[group][0][1], x[group][1][1], b.x, b.y);
      mma<T>(acc[n], x[group][0][2], x[group][1][2], x[group][0][3], x[group][1][3], b.z, b.w);
    }
  }
}

// acc += y * tile, where y is 16 x 16 kSteps in the tensor core's own order (the results of
// multiply_by_rows, packed) and the tile has 16 kSteps rows: columns in natural order.
template <class T, int kSteps, int kWidth>
__device__ inline void multiply_tile(float (&acc)[kWidth / 8][4],
                                     const std::uint32_t (&y)[kSteps][4],
                                     const unsigned char* tile) {
  const int lane = threadIdx.x & 31;
  const std::uint32_t base = shared_address(tile);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    const int row = 16 * step + ((lane >> 3) & 1) * 8 + (lane & 7);
#pragma unroll
    for (int n = 0; n < kWidth / 16; ++n) {
      std::uint32_t b[4];
      load_transposed(b, base + tile_offset<kWidth>(row, 2 * n + (lane >> 4)));
      mma<T>(acc[2 * n], y[step][0], y[step][1], y[step][2], y[step][3], b[0], b[1]);
      mma<T>(acc[2 * n + 1], y[step][0], y[step][1], y[step][2], y[step][3], b[2], b[3]);
    }
  }
}

// The left operand whose rows are channels `channel` .. + 15 of a tile and whose columns are its
// rows 16 step .. + 15.
template <int kWidth>
__device__ inline void load_channels(std::uint32_t (&a)[4], const unsigned char* tile, int channel,
                                     int step) {
  const int lane = threadIdx.x & 31;
  const int row = 16 * step + (lane >> 4) * 8 + (lane & 7);
  load_transposed(a,
                  shared_address(tile) + tile_offset<kWidth>(row, channel / 8 + ((lane >> 3) & 1)));
}

// Starts copying kRows rows from row `first` on into a tile; zeros where valid(row) is not true and
// from channel `dim` on. All kThreads threads of the block take part; a thread's pieces lie below
// each other.
template <int kRows, int kWidth, int kThreads, class T, class Valid>
__device__ inline void copy_tile(unsigned char* tile, const T* rows, std::int64_t stride, int first,
                                 int dim, Valid&& valid) {
  constexpr int kPieces = kWidth / 8, kStep = kThreads / kPieces;
  static_assert(kStep % 8 == 0 && kRows % kStep == 0, "the permutation repeats every 8 rows");
  const int row = static_cast<int>(threadIdx.x) / kPieces;
  const int piece = static_cast<int>(threadIdx.x) % kPieces;
  const T* from = rows + (first + row) * stride + 8 * piece;
  std::uint32_t to = shared_address(tile) + tile_offset<kWidth>(row, piece);
#pragma unroll
  for (int i = 0; i < kRows / kStep; ++i) {
    const bool there = 8 * piece < dim && valid(first + row + i * kStep);
    copy_async(to, there ? from : rows, there);
    from += kStep * stride;
    to += kStep * kWidth * 2;
  }
}

// The same where all rows and channels are there.
template <int kRows, int kWidth, int kThreads, class T>
__device__ inline void copy_whole_tile(unsigned char* tile, const T* rows, std::int64_t stride,
                                       int first) {
  constexpr int kPieces = kWidth / 8, kStep = kThreads / kPieces;
  const int row = static_cast<int>(threadIdx.x) / kPieces;
  const int piece = static_cast<int>(threadIdx.x) % kPieces;
  const T* from = rows + (first + row) * stride + 8 * piece;
  const std::uint32_t to = shared_address(tile) + tile_offset<kWidth>(row, piece);
#pragma unroll
  for (int i = 0; i < kRows / kStep; ++i) {
    copy_async(to + i * kStep * kWidth * 2, from, true);
    from += kStep * stride;
  }
}

// Four words of each of four lanes of a quad become each other's transpose: afterwards word j of
// lane t is what word t of lane j was. Turns 8 n + 2 t columns into 8 t + 2 n ones.
template <class Word>
__device__ inline void transpose_quad(Word& w0, Word& w1, Word& w2, Word& w3) {
  const int t = threadIdx.x & 3;
  const auto exchange = [](Word& low, Word& high, bool upper, int lanes) {
    const Word got = __shfl_xor_sync(0xFFFFFFFFU, upper ? low : high, lanes);
    low = upper ? got : low;
    high = upper ? high : got;
  };
  exchange(w0, w1, (t & 1) != 0, 1);
  exchange(w2, w3, (t & 1) != 0, 1);
  exchange(w0, w2, (t & 2) != 0, 2);
  exchange(w1, w3, (t & 2) != 0, 2);
}

// Results in natural order become results in direct order.
template <int kWidth>
__device__ inline void to_direct(float (&acc)[kWidth / 8][4]) {
#pragma unroll
  for (int group = 0; group < kWidth / 32; ++group) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      transpose_quad(acc[4 * group][i], acc[4 * group + 1][i], acc[4 * group + 2][i],
                     acc[4 * group + 3][i]);
    }
  }
}

}  // namespace lln::cuda
