// Sums over the tokens of each piece for causal LLN of 129 to 256 channels: s and K of keys, T and
// G of the rows of all query heads of a group. Then running sums over the pieces of a sequence, in
// their order, as the tokens of other pieces meet them.
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
    const bool inside = part.channel + 8 * (own % kPieces) < call.dim;
#pragma unroll
    for (int i = 0; i < kChunk / kStep; ++i) {
      const int row = own / kPieces + i * kStep;
      auto* const at =
          reinterpret_cast<uint4*>(x_tile + tile_offset<Shape::kWidth>(row, own % kPieces));
      if (!inside || ((bits >> row) & 1) == 0) {
        *at = {0, 0, 0, 0};
        continue;
      }
      uint4 words = exponentials(*at, scale);
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

// What a thread adds: four neighbouring numbers of K, then of s, over the pieces of a sequence.
struct WideRunningSum {
  std::int64_t s, head, slot;  // slot: of the sequence's first piece
  int pieces;
  std::int64_t element, values;  // element: from `values` on those of s

  __device__ WideRunningSum(const DeviceCall& call, int threads) {
    const auto dim = static_cast<std::uint32_t>(call.dim);
    const std::uint32_t all = dim * static_cast<std::uint32_t>(call.dim_v);
    const std::uint32_t blocks = ((all + dim) / 4 - 1) / static_cast<std::uint32_t>(threads) + 1;
    const auto heads = static_cast<std::uint32_t>(call.heads_k);
    const std::uint32_t pair = blockIdx.x / blocks;
    s = pair / heads;
    head = pair % heads;
    values = all;
    element = (static_cast<std::int64_t>(blockIdx.x % blocks) * threads + threadIdx.x) * 4;
    const DeviceSequence sequence = sequence_at(call.sequences, s);
    const std::int64_t left = sequence.q_tokens - sequence.key_first;
    pieces = left <= 0 ? 0 : static_cast<int>((left - 1) >> kWideCausalPieceLog2) + 1;
    slot = causal_slot<kWideCausalPieceLog2>(call, sequence, sequence.key_first);
  }
};

inline constexpr int kWideJoinThreads = 128;

// kRows: from the last piece to the second.
template <bool kRows>
__global__ void __launch_bounds__(kWideJoinThreads)
    wide_causal_join(const __grid_constant__ WideCausalCall wide) {
  constexpr int kAtOnce = 8;  // loads under way
  const DeviceCall& call = wide.causal.call;
  const Partials& sums = wide.causal.before;
  const WideRunningSum at(call, kWideJoinThreads);
  if (at.element >= at.values + call.dim) return;
  const bool of_values = at.element < at.values;
  const std::int64_t stride = of_values ? at.values : call.dim;
  const std::int64_t element = of_values ? at.element : at.element - at.values;
  const float* const from = of_values ? sums.values : sums.s;
  const auto place = [&](int step) {  // of the step-th piece after the first that is added
    const int piece = kRows ? at.pieces - 1 - step : 1 + step;
    return ((at.slot + piece) * call.heads_k + at.head) * stride + element;
  };
  float total[4] = {};
  for (int first = 0; first < at.pieces - 1; first += kAtOnce) {
    float4 own[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i < at.pieces - 1) {
        own[i] = *reinterpret_cast<const float4*>(from + place(first + i));
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      if (first + i >= at.pieces - 1) continue;
      total[0] += own[i].x;
      total[1] += own[i].y;
      total[2] += own[i].z;
      total[3] += own[i].w;
      if (of_values) {
        *reinterpret_cast<uint2*>(wide.matrices + place(first + i)) = {
            pack<Bf16>(total[0], total[1]), pack<Bf16>(total[2], total[3])};
      } else {
        *reinterpret_cast<float4*>(wide.masses + place(first + i)) = {total[0], total[1], total[2],
                                                                      total[3]};
      }
    }
  }
}

// (c, C) after the last token of every sequence: the sums of its last piece, which lie in place of
// C, and those before it.
__global__ void __launch_bounds__(kWideJoinThreads)
    wide_causal_save(const __grid_constant__ WideCausalCall wide) {
  const CausalCall& causal = wide.causal;
  const DeviceCall& call = causal.call;
  const Partials& sums = causal.before;
  const WideRunningSum at(call, kWideJoinThreads);
  if (at.element >= at.values + call.dim) return;
  const bool of_values = at.element < at.values;
  const std::int64_t element = of_values ? at.element : at.element - at.values;
  const std::int64_t channel = of_values ? element / call.dim_v : element;
  const float* const last = wide.last_masses + (at.s * call.heads_k + at.head) * call.dim;
  const auto slot = [&](int piece) { return (at.slot + piece) * call.heads_k + at.head; };
  float total[4] = {}, mass = 0;
  for (int piece = 1; piece < at.pieces; ++piece) {
    if (of_values) {
      const float4 own =
          *reinterpret_cast<const float4*>(sums.values + slot(piece) * at.values + element);
      total[0] += own.x;
      total[1] += own.y;
      total[2] += own.z;
      total[3] += own.w;
      mass += sums.s[slot(piece) * call.dim + channel];
    } else {
#pragma unroll
      for (int i = 0; i < 4; ++i) total[i] += sums.s[slot(piece) * call.dim + channel + i];
    }
  }
  bool good = true;
  if (of_values) {
    float* const to = causal.saved.values_at(at.s, at.head) + channel * causal.saved.row +
                      (element - channel * call.dim_v);
    mass += last[channel];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      to[i] = mass == 0 ? 0 : (total[i] + to[i]) / mass;
      good = good && fabsf(to[i]) <= kLargestBf16;
    }
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float s = total[i] + last[channel + i];
      good = good && s <= kLargestBf16;
      causal.saved.c_at(at.s, at.head)[channel + i] = s == 0 ? -INFINITY : logf(s);
    }
  }
  CausalPiece piece;
  piece.s = at.s;
  piece.head_k = at.head;
  report_reach(causal, piece, good);
}

}  // namespace lln::cuda
