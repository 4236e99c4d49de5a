// Sums over the tokens of each piece for causal LLN of 129 to 256 channels: s and K of keys, T and
// G of the rows of all query heads of a group.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_wide_causal_tiles.cuh"

namespace lln::cuda {

struct WideSumsShape {
  static constexpr int kWidth = 128;  // channels, and columns, of a block
  static constexpr int kThreads = 256;
  static constexpr int kStages = 2;
  static constexpr int kTileBytes = kChunk * kWidth * 2;
  static constexpr int kShared = kStages * (2 * kTileBytes + kChunk * 4);
  static constexpr int kColumns = 64;  // of a warp, which has 32 channels
};

// Blocks of a piece and key head.
__host__ __device__ inline int wide_sum_parts(std::int64_t dim) {
  return dim > WideSumsShape::kWidth ? 2 : 1;
}

// A warp's 32 channels of the sums, and x^T times a vector in two parts.
struct WideSums {
  using Shape = WideSumsShape;
  float values[2][Shape::kColumns / 8][4] = {};
  float mass[2][4] = {};
  int channel, column;  // in the tile

  __device__ WideSums() : channel(32 * (warp_index() / 2)), column(64 * (warp_index() % 2)) {}

  // The vector's numbers of 16 tokens as two columns, and zeros.
  __device__ static void operand(std::uint32_t (&b)[2], const float* vector) {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 x = *reinterpret_cast<const float2*>(vector + 8 * i + 2 * t);
      b[i] = pack<Bf16>(x.x, x.y);
      const float2 high = unpack<Bf16>(b[i]);
      if (g == 1) b[i] = pack<Bf16>(x.x - high.x, x.y - high.y);
      if (g > 1) b[i] = 0;
    }
  }
  __device__ void add(const unsigned char* x_tile, const unsigned char* y_tile,
                      const float* vector) {
#pragma unroll 2
    for (int step = 0; step < kChunk / 16; ++step) {
      std::uint32_t a[2][4], b[2];
      operand(b, vector + 16 * step);
#pragma unroll
      for (int band = 0; band < 2; ++band) {
        load_channels<Shape::kWidth>(a[band], x_tile, channel + 16 * band, step);
        mma(mass[band], a[band], b[0], b[1]);
        multiply_by_tile<Shape::kWidth>(values[band], a[band], y_tile, 16 * step, column);
      }
    }
  }
  // To rows of `stride` numbers; channels and columns count from the block's.
  __device__ void write(float* masses, float* to, std::int64_t stride, int dim, int dim_v,
                        bool lead) const {
    const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int band = i / 2, half = i % 2, row = channel + 16 * band + g + 8 * half;
      if (row >= dim) continue;
      if (lead && column == 0 && t == 0) {
        masses[row] = mass[band][2 * half] + mass[band][2 * half + 1];
      }
#pragma unroll
      for (int n = 0; n < Shape::kColumns / 8; ++n) {
        if (column + 8 * n >= dim_v) continue;
        *reinterpret_cast<float2*>(to + row * stride + column + 8 * n + 2 * t) = {
            values[band][n][2 * half], values[band][n][2 * half + 1]};
      }
    }
  }
};

// Which part of which sums a block makes.
struct WideSumsPart {
  std::uint32_t piece;
  int channel, column;  // the first ones

  __device__ explicit WideSumsPart(const DeviceCall& call) {
    const auto columns = static_cast<std::uint32_t>(wide_sum_parts(call.dim_v));
    const std::uint32_t parts = columns * static_cast<std::uint32_t>(wide_sum_parts(call.dim));
    const std::uint32_t part = blockIdx.x % parts;
    piece = blockIdx.x / parts;
    channel = static_cast<int>(part / columns) * WideSumsShape::kWidth;
    column = static_cast<int>(part % columns) * WideSumsShape::kWidth;
  }
};

// Tokens of a piece on their way to shared memory: k and v, or q and g of the query heads of a
// group, tile by tile.
template <bool kRows>
struct WideSumsTokens {
  using Shape = WideSumsShape;
  const WideCausalCall& wide;
  const CausalPiece& piece;
  const WideSumsPart& part;
  int tiles, items;

  __device__ WideSumsTokens(const WideCausalCall& call, const CausalPiece& at,
                            const WideSumsPart& of)
      : wide(call), piece(at), part(of), tiles((max(at.count, 0) + kChunk - 1) / kChunk) {
    const DeviceCall& device = wide.causal.call;
    items = tiles * (kRows ? static_cast<int>(static_cast<std::uint32_t>(device.heads) /
                                              static_cast<std::uint32_t>(device.heads_k))
                           : 1);
  }
  __device__ std::uint64_t valid(int tile) const {
    const int first = tile * kChunk;
    if constexpr (kRows) {
      const int left = piece.count - first;
      return left >= kChunk ? ~std::uint64_t{0} : (std::uint64_t{1} << left) - 1;
    }
    return valid_keys(wide.causal.call.sequences, piece.sequence, piece.begin + first,
                      min(piece.begin + piece.count, piece.sequence.key_end));
  }
  __device__ void copy(unsigned char* x_tile, int item) const {
    const DeviceCall& call = wide.causal.call;
    const int tile = item % tiles, first = tile * kChunk;
    CausalPiece at = piece;
    at.head += item / tiles;
    const Bf16* const x = kRows ? at.rows<const Bf16>(call.q) : at.keys<const Bf16>(call.k);
    const Bf16* const y = kRows ? at.rows<const Bf16>(call.g) : at.keys<const Bf16>(call.v);
    const std::int64_t x_stride = kRows ? call.q.token : call.k.token;
    const std::int64_t y_stride = kRows ? call.g.token : call.v.token;
    const std::uint64_t bits = valid(tile);
    const auto there = [=](int row) { return ((bits >> (row - first)) & 1) != 0; };
    copy_tile<kChunk, Shape::kWidth, Shape::kThreads>(x_tile, x + part.channel, x_stride, first,
                                                      static_cast<int>(call.dim) - part.channel,
                                                      there);
    copy_tile<kChunk, Shape::kWidth, Shape::kThreads>(
        x_tile + Shape::kTileBytes, y + part.column, y_stride, first,
        static_cast<int>(call.dim_v) - part.column, there);
  }
  // Eu, or Y, in place of k or q, by the threads that copied them; and the vector, ones or delta.
  __device__ void arrived(unsigned char* x_tile, int item) const {
    const DeviceCall& call = wide.causal.call;
    const int tile = item % tiles, own = static_cast<int>(threadIdx.x);
    const std::int64_t head = piece.head + item / tiles;
    const float scale =
        (kRows ? scale_at(call.alpha, piece.s, head) : scale_at(call.beta, piece.s, piece.head_k)) *
        kLog2E;
    const std::uint64_t bits = valid(tile);
    const std::int64_t statistics =
        kRows ? statistics_at(wide.causal, piece, head) + tile * kChunk : 0;
    constexpr int kPieces = Shape::kWidth / 8, kStep = Shape::kThreads / kPieces;
    const int channel = part.channel + 8 * (own % kPieces);
#pragma unroll
    for (int i = 0; i < kChunk / kStep; ++i) {
      const int row = own / kPieces + i * kStep;
      auto* const at =
          reinterpret_cast<uint4*>(x_tile + tile_offset<Shape::kWidth>(row, own % kPieces));
      if (channel >= call.dim || ((bits >> row) & 1) == 0) {
        *at = {0, 0, 0, 0};
        continue;
      }
      uint4 words =
          kRows ? row_exponentials(*at, scale, call.channels - channel) : exponentials(*at, scale);
      if constexpr (kRows) {
        const float factor = wide.causal.inverse[statistics + row];
        const auto weight = [&](std::uint32_t word) {
          const float2 e = unpack<Bf16>(word);
          return pack<Bf16>(e.x * factor, e.y * factor);
        };
        words = {weight(words.x), weight(words.y), weight(words.z), weight(words.w)};
      }
      *at = words;
    }
    if (own < kChunk) {
      auto* const vector = reinterpret_cast<float*>(x_tile + 2 * Shape::kTileBytes);
      const bool there = ((bits >> own) & 1) != 0;
      vector[own] = !there ? 0 : kRows ? wide.causal.delta[statistics + own] : 1;
    }
  }
};

// Keys: the sums of each piece for the one behind it, and of the last one where the state is saved.
// Rows: those of each piece but the first for the one before it.
template <bool kRows>
__global__ void __launch_bounds__(WideSumsShape::kThreads, 2)
    wide_causal_sums(const __grid_constant__ WideCausalCall wide) {
  using Shape = WideSumsShape;
  LLN_DYNAMIC_SHARED(shared);
  const CausalCall& causal = wide.causal;
  const DeviceCall& call = causal.call;
  const WideSumsPart part(call);
  const CausalPiece piece = find_causal_piece<true, kWideCausalPieceLog2>(call, part.piece);
  const bool saves = !kRows && piece.last && wide.last_masses != nullptr;
  if (piece.s < 0 || (kRows ? piece.first : piece.last && !saves)) return;
  const WideSumsTokens<kRows> tokens(wide, piece, part);
  const auto start = [&](int item) {
    if (item < tokens.items) {
      tokens.copy(shared + item % Shape::kStages * (Shape::kShared / Shape::kStages), item);
    }
    copy_commit();
  };
  WideSums sums;
  start(0);
  for (int item = 0; item < tokens.items; ++item) {
    unsigned char* const x_tile =
        shared + item % Shape::kStages * (Shape::kShared / Shape::kStages);
    copy_wait<0>();
    tokens.arrived(x_tile, item);
    __syncthreads();
    start(item + 1);
    sums.add(x_tile, x_tile + Shape::kTileBytes,
             reinterpret_cast<const float*>(x_tile + 2 * Shape::kTileBytes));
  }
  const std::int64_t dim = call.dim, dim_v = call.dim_v;
  const std::int64_t slot = (piece.slot + (kRows ? 0 : 1)) * call.heads_k + piece.head_k;
  float* masses = causal.before.s + slot * dim;
  float* values = causal.before.values + slot * dim * dim_v;
  std::int64_t stride = dim_v;
  if (saves) {
    masses = wide.last_masses + (piece.s * call.heads_k + piece.head_k) * dim;
    values = causal.saved.values_at(piece.s, piece.head_k);
    stride = causal.saved.row;
  }
  sums.write(masses + part.channel, values + part.channel * stride + part.column, stride,
             static_cast<int>(dim) - part.channel, static_cast<int>(dim_v) - part.column,
             part.column == 0);
}

}  // namespace lln::cuda
