// The forward pass over rows of Diag and LLN+Diag. A warp holds 16 rows of q, takes them against
// tiles of keys and values that pass through shared memory, as flash attention does, and then
// against C, which stays there.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_diag_add.cuh"
#include "cuda/tiled_diag_walk.cuh"
#include "cuda/tiled_rows_backward.cuh"

namespace lln::cuda {

inline constexpr int kPassWidth = 32;  // columns of o that are finished together

template <int kDim, bool kLln>
struct DiagForwardShape {
  static constexpr int kTileBytes = kDiagTile * kDim * 2;
  static constexpr int kStageBytes = 2 * kTileBytes;  // k and v
  static constexpr int kOperand = kLln ? kOperandBytes<kDim, kDim> : 0;
  static constexpr int kExponents = kLln ? sizeof(RowExponents<kDim>) : 0;
  static constexpr int kShared = 2 * kStageBytes + kOperand + kExponents + 2 * kDim * 4;
};

// Results with columns in natural order, 32 of them, as rows of the caller's type.
template <class T>
__device__ inline void store_natural(T* rows, std::int64_t stride, int first, int end, int dim,
                                     const float (&acc)[4][4]) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    std::uint32_t words[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) words[n] = pack<T>(acc[n][2 * half], acc[n][2 * half + 1]);
    transpose_quad(words[0], words[1], words[2], words[3]);
    const int row = first + g + 8 * half;
    if (row < end && 8 * t < dim) {
      __stcs(reinterpret_cast<uint4*>(rows + row * stride + 8 * t),
             uint4{words[0], words[1], words[2], words[3]});
    }
  }
}

// Sums with weights up to 2^this would leave f32 for values at the end of bf16's range, so weights
// are made so much smaller.
template <class T>
inline constexpr float kHeadroom = std::is_same_v<T, Bf16> ? 30 : 0;

// The softmax of 16 rows over their keys so far, in units of log2.
template <int kDim>
struct DiagRows {
  float top[2];  // scores before they are scaled
  float mass[4];
  float acc[kDim / 8][4];

  __device__ void reset() {
    top[0] = top[1] = kNoExponent;
#pragma unroll
    for (int i = 0; i < 4; ++i) mass[i] = 0;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[n][i] = 0;
    }
  }

  // Adds a tile of keys; `scale` is positive.
  template <class T>
  __device__ void add(const RowWords<kDim>& q, const unsigned char* k_tile,
                      const unsigned char* v_tile, float scale, const std::uint64_t (&seen)[2],
                      bool first) {
    constexpr int kCount = kDiagTile / 8, kSteps = kDiagTile / 16;
    float scores[kCount][4] = {};
    multiply_by_rows<T, kDim, kCount>(scores, q, k_tile);
    mask_scores(scores, seen);
    std::uint32_t p[kSteps][4];
    soften<T>(p, scores, scale, first);
    multiply_tile<T, kSteps, kDim>(acc, p, v_tile);
  }

  // Scores of more keys become weights, with the reference that the sums so far change to.
  template <class T, int kCount>
  __device__ void soften(std::uint32_t (&p)[kCount / 2][4], const float (&scores)[kCount][4],
                         float scale, bool first) {
    float next[2] = {top[0], top[1]};
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) next[i >> 1] = fmaxf(next[i >> 1], scores[n][i]);
    }
    next[0] = quad_max(next[0]);
    next[1] = quad_max(next[1]);
    if (!first)
      rescale(exp2_fast((top[0] - next[0]) * scale), exp2_fast((top[1] - next[1]) * scale));
    top[0] = next[0];
    top[1] = next[1];
    const float shift[2] = {-next[0] * scale - kHeadroom<T>, -next[1] * scale - kHeadroom<T>};
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        p[n / 2][2 * (n % 2) + half] =
            pack<T>(exp2_fast(fmaf(scores[n][2 * half], scale, shift[half])),
                    exp2_fast(fmaf(scores[n][2 * half + 1], scale, shift[half])));
      }
    }
    const std::uint32_t ones = pack<T>(1, 1);
#pragma unroll
    for (int step = 0; step < kCount / 2; ++step) {
      mma<T>(mass, p[step][0], p[step][1], p[step][2], p[step][3], ones, ones);
    }
  }

  __device__ void scale_columns(const float* factors) {
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const float2 factor =
          *reinterpret_cast<const float2*>(factors + 8 * n + 2 * (threadIdx.x & 3));
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[n][i] *= i % 2 == 0 ? factor.x : factor.y;
    }
  }

  __device__ void rescale(float low, float high) {
    mass[0] *= low;
    mass[2] *= high;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[n][i] *= i < 2 ? low : high;
    }
  }
};

// Copies words that came from memory four in a row into registers that need not be so: the tensor
// core wants other neighbours, and the compiler would move them there before every product. `zero`
// is one that it does not know to be.
template <int kDim>
__device__ inline void take_rows(RowWords<kDim>& to, const RowWords<kDim>& from,
                                 std::uint32_t zero) {
#pragma unroll
  for (int i = 0; i < kDim / 4; ++i) {
    to[i / 8][i / 4 % 2][i % 4] = from[i / 8][i / 4 % 2][i % 4] ^ zero;
  }
}

// To two units in the last place.
__device__ inline float quick_inverse(float sum) { return sum == 0 ? 0 : __fdividef(1, sum); }

// e of 16 rows from memory where moderate_weights() does not do. Not inlined: it is for rare rows,
// and its registers would be everybody's.
template <class T, int kDim>
__device__ __noinline__ void careful_from_memory(RowWords<kDim>& e, const T* q, std::int64_t stride,
                                                 int row, int end, int dim,
                                                 const RowExponents<kDim>& exponents, float scale,
                                                 float taken_out) {
  load_rows<kDim>(e, q, stride, row, end, dim);
  careful_weights<T, kDim>(e, exponents, scale, taken_out);
}

template <class T, int kDim, bool kLln, bool kSeveral>
__global__ void __launch_bounds__(kDiagThreads, kDim <= 64 ? 4 : 2)
    rows_diag_forward(const __grid_constant__ TiledCall tiled) {
  using Shape = DiagForwardShape<kDim, kLln>;
  constexpr int kPasses = kDim / kPassWidth;
  constexpr int kPassWords = kOperandBytes<kDim, kPassWidth> / 16;
  LLN_DYNAMIC_SHARED(shared);
  uint4* const operand = reinterpret_cast<uint4*>(shared + 2 * Shape::kStageBytes);
  auto& exponents =
      *reinterpret_cast<RowExponents<kDim>*>(shared + 2 * Shape::kStageBytes + Shape::kOperand);
  float* const channels = reinterpret_cast<float*>(shared + 2 * Shape::kStageBytes +
                                                   Shape::kOperand + Shape::kExponents);
  float* const lln_channels = channels + kDim;
  const DeviceCall& call = tiled.call;
  const DiagPiece piece = find_diag_rows<kLln>(tiled);
  if (piece.rows.s < 0) return;
  const std::int64_t head = piece.rows.head;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const T* const q = piece.rows.template rows<T>(call.q);
  T* const o = piece.rows.template rows<T>(call.o);
  const int lane = threadIdx.x & 31, warp_row = 16 * (static_cast<int>(threadIdx.x) >> 5);
  const auto keys = keys_of<T, kDim, kDiagThreads>(call, piece.rows);
  using Step = DiagStep<kSeveral>;
  const auto start = [&](const Step& step, unsigned char* stage) {
    start_keys(keys, call.sequences, piece, step, stage);
    copy_commit();
  };
  Step ahead;
  ahead.open(piece);
  start(ahead, shared);
  RowWords<kDim> next_q;
  load_rows<kDim>(next_q, q, call.q.token, warp_row, piece.tile_end(0), dim);

  for (int c = static_cast<int>(threadIdx.x); c < kDim; c += kDiagThreads) {
    channels[c] = c < dim_v ? channel_factor(call.diag_weight, head, c) : 0;
    lln_channels[c] =
        c < dim_v ? exp2f(-kHeadroom<T>) * channel_factor(call.lln_weight, head, c) : 0;
  }
  wait_for_previous();
  float taken_out = 0;
  if constexpr (kLln) {
    taken_out = fill_exponents<T, kDim>(
        exponents, tiled.state.c_at(piece.rows.s, piece.rows.head_k), dim, call.channels);
    const float* const values = tiled.state.values_at(piece.rows.s, piece.rows.head_k);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      const int column = pass * kPassWidth;
      const OperandFill<T, kDim, kPassWidth, kDiagThreads> fill(values + column, tiled.state.row,
                                                                dim, dim_v - column);
      fill.template write<Columns::natural>(operand + pass * kPassWords, [&](int l, int c) {
        return exponents.w[l] * lln_channels[column + c];
      });
    }
  }
  const RowFactor lln_factor = row_factor(call.lln_weight, piece.rows.sequence, head);
  const RowFactor diag_factor = row_factor(call.diag_weight, piece.rows.sequence, head);
  const float scale = kLog2E * rsqrtf(static_cast<float>(call.channels));
  const float lln_scale = kLln ? scale_at(call.alpha, piece.rows.s, head) * kLog2E : 0;
  const std::uint32_t zero = gridDim.y - 1;
  RowWords<kDim> q_rows;
  DiagRows<kDim> rows;
  for (int stage = 0; ahead.tile < piece.tiles; stage ^= 1) {
    const Step step = ahead;
    ahead.next(piece, 1);
    copy_wait<0>();
    __syncthreads();
    start(ahead, shared + (stage ^ 1) * Shape::kStageBytes);
    const int row = piece.tile_begin(step.tile) + warp_row, end = piece.tile_end(step.tile);
    const int own[2] = {min(row + (lane >> 2), end - 1), min(row + (lane >> 2) + 8, end - 1)};
    if (step.opens()) {
      take_rows<kDim>(q_rows, next_q, zero);
      load_rows<kDim>(next_q, q, call.q.token, piece.tile_begin(step.tile + 1) + warp_row,
                      piece.tile_end(step.tile + 1), dim);
      rows.reset();
    }
    if (step.has_keys()) {
      const unsigned char* const k_tile = shared + stage * Shape::kStageBytes;
      const std::uint64_t valid = step_keys(call.sequences, piece, step);
      const std::uint64_t seen[2] = {seen_keys(piece, step, own[0], valid),
                                     seen_keys(piece, step, own[1], valid)};
      rows.template add<T>(q_rows, k_tile, k_tile + Shape::kTileBytes, scale, seen, step.opens());
    }
    if (!step.last_keys()) continue;
    float lln[2] = {0, 0};
    if constexpr (kLln) {
      float sum[4] = {};
      const float room = exp2f(kHeadroom<T>);
      if constexpr (std::is_same_v<T, Bf16>) {
        moderate_weights<T, kDim>(q_rows, lln_scale);
        multiply_vector<T, kDim>(sum, q_rows, exponents.packed_w);
        if (!trusted(sum, exponents)) {
          RowWords<kDim> again;  // in memory, unlike q_rows
          careful_from_memory<T, kDim>(again, q, call.q.token, row, end, dim, exponents, lln_scale,
                                       taken_out);
          take_rows<kDim>(q_rows, again, zero);
          sum[0] = sum[2] = 0;
          multiply_vector<T, kDim>(sum, q_rows, exponents.packed_w);
        }
      } else {
        careful_weights<T, kDim>(q_rows, exponents, lln_scale, taken_out);
        multiply_vector<T, kDim>(sum, q_rows, exponents.packed_w);
      }
      lln[0] = quick_inverse(sum[0]) * room * lln_factor(piece.rows.begin + own[0]);
      lln[1] = quick_inverse(sum[2]) * room * lln_factor(piece.rows.begin + own[1]);
    }
    if (call.diag_weight.channel != 0) rows.scale_columns(channels);
    const float diag[2] = {quick_inverse(rows.mass[0]) * diag_factor(piece.rows.begin + own[0]),
                           quick_inverse(rows.mass[2]) * diag_factor(piece.rows.begin + own[1])};
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      float out[4][4] = {};
      if constexpr (kLln) {
        multiply<T, kDim, kPassWidth>(out, q_rows, operand + pass * kPassWords);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          out[n][i] = fmaf(rows.acc[4 * pass + n][i], diag[i >> 1], out[n][i] * lln[i >> 1]);
        }
      }
      T* const to = o + pass * kPassWidth;
      const int columns = dim_v - pass * kPassWidth;
      if constexpr (kAddsToLln<T, kDim, kLln>) {
        if (tiled.adds) add_stored_natural<T>(out, to, call.o.token, row, end, columns);
      }
      store_natural<T>(to, call.o.token, row, end, columns, out);
    }
  }
}

}  // namespace lln::cuda
