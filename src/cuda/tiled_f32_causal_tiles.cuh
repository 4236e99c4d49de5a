// What the causal walks of f32 and f16 share: chunks of 32 tokens as split tiles in shared memory
// (split_tiles.cuh), products of their pairs of tokens, and the sums of a state over a chunk.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/split_tiles.cuh"
#include "cuda/tiled_causal_tiles.cuh"
#include "cuda/tiled_f32_rows_backward.cuh"

namespace lln::cuda {

inline constexpr int kFloatChunk = 32;  // tokens, in two groups of 16

// Of numbers in products: f16 ones are exact in two, and weights and states have errors of 2^-16
// then, where results are rounded to 2^-11. Products of pairs of tokens keep three: gradients are
// differences of them, and 0 where a row sees one key alone.
template <class T>
inline constexpr int kCausalParts = std::is_same_v<T, float> ? 3 : 2;

template <class T, int kDim>
struct FloatCausalShape {
  static constexpr int kThreads = 2 * kDim;   // a warp for 16 channels of a state
  static constexpr int kSlices = kDim / 32;   // of channels: the warps that share 16 tokens
  static constexpr int kPairs = 4 / kSlices;  // results of 8 tokens that a warp has of 16 x 32
  static constexpr int kParts = kCausalParts<T>;
  static constexpr int kTileBytes = kSplitBytes<kFloatChunk, kDim, kParts>;
  static constexpr int kStateBytes = kSplitBytes<kDim, kDim, kParts>;
  static constexpr int kPairBytes = kSplitBytes<kFloatChunk, kFloatChunk>;
};

// A warp's part of a chunk: 16 tokens and 32 channels.
template <class T, int kDim>
struct FloatCausalPart {
  using Shape = FloatCausalShape<T, kDim>;
  using Pairs = float[Shape::kPairs][4];
  using Operand = SplitIn<Shape::kParts>[4];

  int first;    // of its tokens
  int slice;    // of its channels
  int partner;  // first of the tokens that it multiplies its own with

  __device__ FloatCausalPart() {
    const int warp = warp_index();
    first = warp / Shape::kSlices * 16;
    slice = warp % Shape::kSlices;
    partner = slice * Shape::kPairs * 8;
  }

  // The warps that share this one's tokens.
  __device__ void meet_group() const { meet(1 + first / 16, kDim); }

  // Whether some row sees some key, of rows that are the warp's tokens and keys that are its
  // partners, or the other way round.
  __device__ bool sees_partners() const { return partner <= first + 15; }
  __device__ bool is_seen() const { return partner + 8 * Shape::kPairs > first; }

  // x y^T for the warp's tokens in x and its partners in y.
  __device__ void multiply_pairs(Pairs& acc, const unsigned char* x, const unsigned char* y) const {
    constexpr int kPart = kSplitPart<kFloatChunk, kDim>;
    const int lane = threadIdx.x & 31;
#pragma unroll 1  // as in multiply_split_rows
    for (int group = 0; group < kDim / 32; ++group) {
      Operand a[2];  // of the two steps of 16 channels
#pragma unroll
      for (int step = 0; step < 2; ++step) {
        load_split<kPart, false>(
            a[step], shared_address(x) + tile_offset<kDim>(first + (lane & 15),
                                                           4 * group + 2 * step + (lane >> 4)));
      }
#pragma unroll
      for (int n = 0; n < Shape::kPairs; ++n) {
        std::uint32_t b[Shape::kParts][4];
        load_split<kPart, false>(
            b, shared_address(y) +
                   tile_offset<kDim>(partner + 8 * n + (lane & 7), 4 * group + (lane >> 3)));
        mma_split(acc[n], a[0], b, 0);
        mma_split(acc[n], a[1], b, 2);
      }
    }
  }

  // Zeros where a row does not see a key; kOwnRows: the warp's tokens are the rows.
  template <bool kOwnRows>
  __device__ void mask_pairs(Pairs& x) const {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 4 * Shape::kPairs; ++i) {
      const int own = first + (lane >> 2) + 8 * (i / 2 % 2);
      const int other = partner + i / 4 * 8 + 2 * (lane & 3) + i % 2;
      if (kOwnRows ? other > own : other < own) x[i / 4][i % 4] = 0;
    }
  }

  __device__ void write_pairs(unsigned char* tile, const Pairs& x) const {
    write_split_results<kFloatChunk, kFloatChunk>(tile, first, partner / 8, x);
  }

  // The warp's tokens and 16 others of a tile of pairs as a left operand.
  __device__ void load_pairs(Split (&a)[4], const unsigned char* pairs, int step) const {
    const int lane = threadIdx.x & 31;
    load_split<kSplitPart<kFloatChunk, kFloatChunk>, false>(
        a, shared_address(pairs) +
               tile_offset<kFloatChunk>(first + (lane & 15), 2 * step + (lane >> 4)));
  }

  // acc += pairs y at the warp's channels, for the tokens 16 step .. + 15 of y.
  __device__ void multiply_by_pairs(float (&acc)[4][4], const unsigned char* pairs,
                                    const unsigned char* y, int step) const {
    Split a[4];
    load_pairs(a, pairs, step);
    multiply_split_step<kDim, false, kFloatChunk, Shape::kParts>(acc, a, y, step, 4 * slice);
  }

  // acc += x state or, where kTransposed, x state^T, at the warp's channels.
  template <bool kTransposed>
  __device__ void multiply_by_state(float (&acc)[4][4], const unsigned char* x,
                                    const unsigned char* state) const {
    multiply_split_rows<kFloatChunk, kDim, kTransposed, kDim, Shape::kParts>(acc, x, first, state,
                                                                             4 * slice);
  }

  // The warp's rows and channels into a tile.
  __device__ void write_rows(unsigned char* tile, const RowFloats<32>& x) const {
    write_split_rows<kFloatChunk, kDim, Shape::kParts>(tile, first, slice, x);
  }
};

// The largest |x| of the numbers shown to it; NaN where one of them is.
class LargestFloat {
 public:
  __device__ void see(float x) { top_ = max_keep_nan(top_, fabsf(x)); }
  template <int kCount>
  __device__ void see(const float (&x)[kCount][4]) {
#pragma unroll
    for (int i = 0; i < 4 * kCount; ++i) see(x[i / 4][i % 4]);
  }
  __device__ void see(const RowFloats<32>& x) {
#pragma unroll
    for (int i = 0; i < 16; ++i) see(x[0][i / 8][i % 8]);
  }
  __device__ bool at_most(float limit) const { return top_ <= limit; }

 private:
  float top_ = 0;
};
inline constexpr float kLargestFloat = 3.4028235e38F;

// Of results that are in reach. Where Diag is added to what has been stored, that must be finite:
// the sum of both may be.
template <class T>
__device__ inline float largest_result(const DeviceCall& call) {
  if (std::is_same_v<T, F16> && call.kind == Kind::lln_diag) return 65504;
  return kLargestFloat;
}

// Whether exponents `scale` x are in reach.
__device__ inline bool moderate(const LargestFloat& x, float scale) {
  return x.at_most(kLargestModerate / fabsf(scale * kLog2E));
}

// 2^(scale x) of 16 rows and 32 channels; zeros in rows that do not count, and from channel `dim`
// on.
__device__ inline void float_exponentials(RowFloats<32>& x, float scale, bool low, bool high,
                                          int dim) {
  const bool there = 8 * (static_cast<int>(threadIdx.x) & 3) < dim;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float& own = x[0][i / 8][i % 8];
    own = there && (i < 8 ? low : high) ? exp2_fast(own * scale) : 0;
  }
}

// The same of queries, 32 channels from `channel` on, with zeros in those that are padding, too.
__device__ inline void query_exponentials(RowFloats<32>& q, float scale, const DeviceCall& call,
                                          int channel) {
  const int left = call.channels - channel - 8 * (static_cast<int>(threadIdx.x) & 3);
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    float& own = q[0][i / 8][i % 8];
    own = i % 8 < left ? exp2_fast(own * scale) : 0;
  }
}

// 16 tokens and 32 channels of a piece's keys; zeros in place of those that do not count.
template <class T>
struct FloatKeys {
  RowFloats<32> k, v;
  bool counts[2];

  __device__ void load(const DeviceCall& call, const CausalPiece& piece, int first, int slice) {
    const auto valid = [&](int row) {
      return row < piece.count && key_valid(call.sequences, piece.sequence, piece.begin + row);
    };
    const int channel = 32 * slice, row = first + (static_cast<int>(threadIdx.x) & 31) / 4;
    counts[0] = valid(row);
    counts[1] = valid(row + 8);
    const auto taken = [&](int r) { return r == row ? counts[0] : counts[1]; };
    load_float_rows_if<32>(k, piece.keys<const T>(call.k) + channel, call.k.token, first,
                           static_cast<int>(call.dim) - channel, taken);
    load_float_rows_if<32>(v, piece.keys<const T>(call.v) + channel, call.v.token, first,
                           static_cast<int>(call.dim_v) - channel, taken);
  }
  // k becomes Eu.
  __device__ void raise(float beta, int dim) {
    float_exponentials(k, beta * kLog2E, counts[0], counts[1], dim);
  }
};

// What the weight of LLN leaves of the gradient of 16 rows.
__device__ inline void weigh_causal_rows(RowFloats<32>& g, const DeviceCall& call,
                                         const CausalPiece& piece, std::int64_t head, int first,
                                         int slice) {
  if (call.kind != Kind::lln_diag) return;
  weigh_float_rows(g, call.lln_weight, piece.sequence, head, piece.begin, first, piece.count,
                   32 * slice, static_cast<int>(call.dim_v));
}

// A state as a right operand, and its masses.
template <int kParts, int kDim>
__device__ inline void write_split_state(unsigned char* tile, float* mass,
                                         const ChannelRows<kDim>& rows) {
  write_split_results<kDim, kDim, kParts>(tile, 16 * warp_index(), 0, rows.values);
  if ((threadIdx.x & 3) != 0) return;
  mass[rows.channel(0)] = rows.mass[0];
  mass[rows.channel(1)] = rows.mass[2];
}

// rows += x^T y over a chunk, and their masses x^T vector.
template <int kParts, int kDim, class Vector>
__device__ inline void add_split_chunk(ChannelRows<kDim>& rows, const unsigned char* x,
                                       const unsigned char* y, Vector&& vector) {
  const int t = threadIdx.x & 3;
#pragma unroll 1
  for (int first = 0; first < kFloatChunk; first += 16) {
    SplitIn<kParts> a[4];
    load_split_channels<kFloatChunk, kDim>(a, x, 16 * warp_index(), first);
    const int token = first + 2 * t;
    const Split low = split(vector(token), vector(token + 1));
    const Split high = split(vector(token + 8), vector(token + 9));
    float mass[4] = {};
    mma_split(mass, a, low.part, high.part);
#pragma unroll
    for (int i = 0; i < 4; ++i) rows.mass[i] += mass[i];
    add_split_rows<kFloatChunk, kDim>(rows.values, a, y, first);
  }
}

// Where the parts of a chunk lie in shared memory in walks from the first chunk to the last.
template <class T, int kDim>
struct FloatWalkTiles {
  using Shape = FloatCausalShape<T, kDim>;
  static constexpr int kBytes =
      3 * Shape::kTileBytes + Shape::kStateBytes + Shape::kPairBytes + kDim * 4;

  unsigned char *rows, *eu, *v;  // of rows: Ea, or g
  unsigned char *state, *pairs;
  float *mass, *behind;  // s, and what comes after all of them

  __device__ explicit FloatWalkTiles(unsigned char* shared)
      : rows(shared),
        eu(rows + Shape::kTileBytes),
        v(eu + Shape::kTileBytes),
        state(v + Shape::kTileBytes),
        pairs(state + Shape::kStateBytes),
        mass(reinterpret_cast<float*>(pairs + Shape::kPairBytes)),
        behind(mass + kDim) {}

  // The warp's part of all but the pairs; k has become Eu.
  __device__ void write(const FloatCausalPart<T, kDim>& part, const RowFloats<32>& x,
                        const FloatKeys<T>& keys, const ChannelRows<kDim>& sums) const {
    part.write_rows(rows, x);
    part.write_rows(eu, keys.k);
    part.write_rows(v, keys.v);
    write_split_state<Shape::kParts>(state, mass, sums);
  }
  // The chunk's keys join the state.
  __device__ void add_keys(ChannelRows<kDim>& sums) const {
    add_split_chunk<Shape::kParts>(sums, eu, v, [](int) { return 1.0F; });
  }
};

// The state before a piece.
template <int kDim>
__device__ inline void read_before(ChannelRows<kDim>& state, const CausalCall& causal,
                                   const CausalPiece& piece) {
  if (piece.first) return;
  const DeviceCall& call = causal.call;
  state.read(causal.before, piece.slot * call.heads_k + piece.head_k, static_cast<int>(call.dim),
             static_cast<int>(call.dim_v));
}

// x . vector of 16 rows and 32 channels, the lane's part alone.
__device__ inline void dot_float_rows(float (&sum)[2], const RowFloats<32>& x,
                                      const float* vector) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    sum[i / 8] = fmaf(x[0][i / 8][i % 8], vector[8 * t + i % 8], sum[i / 8]);
  }
}

}  // namespace lln::cuda
