// A block has neighbouring rows of one head, a thread pieces of them: nothing but traffic.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/weighed_rows.h"

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/row_pieces.cuh"
#include "cuda/tiled_plan.h"

namespace lln::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kTurns = 8;  // pieces of a thread

struct WeighedSum {
  Rows to, x, y;
  Weight of_x, of_y;
  std::int64_t tokens;
  std::uint32_t heads, tiles;  // tiles of rows, in each head: a block takes one
  std::uint32_t rows, pieces;  // of a tile; of a row
  bool aligned;
};

template <class Piece>
__device__ void add_weighed(Piece& sum, const Piece& part, const Weight& weight, std::int64_t b,
                            std::int64_t h, std::int64_t n, int channel) {
  float w = weight_at(weight, b, h, n, channel);
#pragma unroll
  for (int i = 0; i < Piece::kCount; ++i) {
    if (weight.channel != 0) w = weight_at(weight, b, h, n, channel + i);
    sum.x[i] = fmaf(w, part.x[i], sum.x[i]);
  }
}

template <class T, bool kWhole>
__global__ void __launch_bounds__(kThreads) weighed_rows(const __grid_constant__ WeighedSum s) {
  using Piece = RowPiece<T, kWhole>;
  const std::uint32_t head = blockIdx.x / s.tiles, tile = blockIdx.x % s.tiles;
  const std::int64_t h = head % s.heads, b = head / s.heads;
  const std::int64_t first = std::int64_t{tile} * s.rows;
  const auto count = static_cast<std::uint32_t>(min(std::int64_t{s.rows}, s.tokens - first));
  for (std::uint32_t i = threadIdx.x; i < count * s.pieces; i += kThreads) {
    const std::int64_t n = first + i / s.pieces;
    const int channel = static_cast<int>(i % s.pieces) * Piece::kCount;
    Piece x, y, sum{};
    x.load(row_at<T>(s.x, b, h, n, channel), s.aligned);
    if (s.y.data != nullptr) y.load(row_at<T>(s.y, b, h, n, channel), s.aligned);
    add_weighed(sum, x, s.of_x, b, h, n, channel);
    if (s.y.data != nullptr) add_weighed(sum, y, s.of_y, b, h, n, channel);
    sum.store(row_at<T>(s.to, b, h, n, channel), s.aligned);
  }
}

using Kernel = void (*)(WeighedSum);

Kernel kernel_of(DType dtype, bool whole) {
  switch (dtype) {
    case DType::bf16:
      return whole ? weighed_rows<Bf16, true> : weighed_rows<Bf16, false>;
    case DType::f16:
      return whole ? weighed_rows<F16, true> : weighed_rows<F16, false>;
    default:
      return whole ? weighed_rows<float, true> : weighed_rows<float, false>;
  }
}

}  // namespace

void launch_weighed_rows(const View& to, const WeighedRows& x, const WeighedRows& y,
                         cudaStream_t stream) {
  const std::int64_t batches = to.shape[0], heads = to.shape[1], channels = to.shape[3];
  if (batches * heads * to.shape[2] * channels == 0) return;
  const bool whole = channels % 8 == 0;
  const auto piece = whole ? 16 / static_cast<std::int64_t>(size_of(to.dtype)) : 1;
  WeighedSum sum{};
  sum.aligned = has_whole_pieces(to) && has_whole_pieces(x.rows) && has_whole_pieces(y.rows);
  sum.to = rows_of(to);
  sum.x = rows_of(x.rows);
  sum.y = rows_of(y.rows);
  sum.of_x = x.weight;
  sum.of_y = y.weight;
  sum.tokens = to.shape[2];
  sum.heads = static_cast<std::uint32_t>(heads);
  sum.pieces = static_cast<std::uint32_t>(channels / piece);
  sum.rows = std::max(1U, kThreads * kTurns / sum.pieces);
  const std::int64_t tiles = blocks_for(sum.tokens, sum.rows);
  sum.tiles = static_cast<std::uint32_t>(tiles);
  launch("weighed_rows", kernel_of(to.dtype, whole),
         LaunchShape{batches * heads * tiles, kThreads, 0, stream}, sum);
}

}  // namespace lln::cuda
