// The forward pass over rows of LLN: weights in registers, then one product with C, which stays in
// shared memory. q comes from memory and o goes there directly.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_weights.cuh"

namespace lln::cuda {

inline constexpr int kRowsThreads = 128;

template <int kDim>
inline constexpr int kRowsShared = kOperandBytes<kDim, kDim> + sizeof(RowExponents<kDim>);

// Which rows a block takes.
struct RowPiece {
  std::int64_t s, head, head_k;
  DeviceSequence sequence;
  std::int64_t begin;  // in the sequence
  int count;

  // The first of them in a tensor with query heads.
  template <class T>
  __device__ T* rows(const Rows& tensor) const {
    return static_cast<T*>(tensor.data) + sequence.batch * tensor.batch + head * tensor.head +
           (sequence.q_begin + begin) * tensor.token;
  }
};

// Block index to piece: one block per row job and query head. s is -1 where there is no such job.
__device__ inline RowPiece find_rows(const DeviceCall& call) {
  RowPiece piece;
  const auto heads = static_cast<std::uint32_t>(call.heads);
  const std::uint32_t group = heads / static_cast<std::uint32_t>(call.heads_k);
  piece.head = blockIdx.x % heads;
  piece.head_k = blockIdx.x % heads / group;
  const JobPlace place = find_job<false>(call.sequences, blockIdx.x / heads);
  piece.s = place.s;
  piece.sequence = place.sequence;
  const std::int64_t tokens = call.sequences.q_jobs.piece(place.sequence.q_tokens);
  piece.begin = place.index * tokens;
  piece.count = static_cast<int>(min(tokens, place.sequence.q_tokens - piece.begin));
  return piece;
}

// The rows of a block and what they are multiplied with. Columns of v in passes of at most 128.
template <class T, int kDim>
struct RowWalk {
  static constexpr int kWidth = kDim < 128 ? kDim : 128, kPasses = kDim / kWidth;

  const uint4* operand;
  const RowExponents<kDim>& exponents;
  const T* q;
  T* o;
  std::int64_t q_stride, o_stride;
  int count, dim, dim_v;
  float scale, taken_out;

  // Rows of o in the columns of one pass.
  __device__ void multiply_pass(float (&acc)[kWidth / 8][4], const RowWords<kDim>& e,
                                const float (&sum)[4], int pass) const {
    const float inverse[2] = {inverse_of(sum[0]), inverse_of(sum[2])};
    multiply<T, kDim, kWidth>(acc, e, operand + pass * kOperandBytes<kDim, kWidth> / 16);
#pragma unroll
    for (int n = 0; n < kWidth / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[n][i] *= inverse[i >> 1];
    }
  }

  template <class Outputs>
  __device__ void put(const RowWords<kDim>& e, const float (&sum)[4], Outputs& outputs) const {
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      float acc[kWidth / 8][4] = {};
      multiply_pass(acc, e, sum, pass);
      outputs.put(acc, pass);
    }
    outputs.skip();
  }

  // 16 rows from scratch. Not inlined: it is for rare rows, and its registers would be everybody's.
  __device__ __noinline__ void careful(int row) const {
    RowWords<kDim> e;
    load_rows<kDim>(e, q, q_stride, row, count, dim);
    careful_weights<T, kDim>(e, exponents, scale, taken_out);
    float sum[4] = {};
    multiply_vector<T, kDim>(sum, e, exponents.packed_w);
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      float acc[kWidth / 8][4] = {};
      multiply_pass(acc, e, sum, pass);
      store_rows<kWidth>(o + pass * kWidth, o_stride, row, count, dim_v - pass * kWidth, acc);
    }
  }
};

template <class T, int kDim>
__global__ void __launch_bounds__(kRowsThreads, kDim <= 64 ? 4 : 3)
    rows_forward(const __grid_constant__ TiledCall tiled) {
  constexpr int kWidth = RowWalk<T, kDim>::kWidth, kPasses = RowWalk<T, kDim>::kPasses;
  constexpr int kStep = kRowsThreads / 2;  // rows of all warps
  extern __shared__ __align__(128) unsigned char shared[];
  uint4* const operand = reinterpret_cast<uint4*>(shared);
  auto& exponents =
      *reinterpret_cast<RowExponents<kDim>*>(shared + kPasses * kOperandBytes<kDim, kWidth>);
  const DeviceCall& call = tiled.call;
  const RowPiece piece = find_rows(call);
  if (piece.s < 0) return;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const T* const q = piece.rows<T>(call.q);
  T* const o = piece.rows<T>(call.o);
  const int warp_row = 16 * (static_cast<int>(threadIdx.x) >> 5);
  RowStream<kDim, const T> rows(q, call.q.token, warp_row, kStep, dim);
  RowWords<kDim> next;
  if (warp_row + 16 <= piece.count) rows.next(next);

  const float taken_out =
      fill_exponents<T, kDim>(exponents, tiled.state.c_at(piece.s, piece.head_k), dim);
  const float* const values = tiled.state.values_at(piece.s, piece.head_k);
#pragma unroll
  for (int pass = 0; pass < kPasses; ++pass) {
    fill_operand<T, kDim, kWidth, Columns::direct>(
        operand + pass * kOperandBytes<kDim, kWidth> / 16, values + pass * kWidth, tiled.state.row,
        dim, dim_v - pass * kWidth, [&](int l, int) { return exponents.w[l]; });
  }
  __syncthreads();
  RowStream<kDim, T> outputs(o, call.o.token, warp_row, kStep, dim_v);
  const RowWalk<T, kDim> walk{operand,
                              exponents,
                              q,
                              o,
                              call.q.token,
                              call.o.token,
                              piece.count,
                              dim,
                              dim_v,
                              scale_at(call.alpha, piece.s, piece.head) * kLog2E,
                              taken_out};
  const int tiles = piece.count < warp_row + 16 ? 0 : (piece.count - warp_row - 16) / kStep + 1;
  for (int tile = 0; tile < tiles; ++tile) {
    RowWords<kDim> e;
    copy_rows<kDim>(e, next);
    if (tile + 1 < tiles) rows.next(next);
    float sum[4] = {};
    if constexpr (std::is_same_v<T, Bf16>) {
      moderate_weights<T, kDim>(e, walk.scale);
      multiply_vector<T, kDim>(sum, e, exponents.packed_w);
      if (!trusted(sum, exponents)) {
        const RowWalk<T, kDim> again = walk;  // a call by reference would keep it in memory
        again.careful(warp_row + tile * kStep);
        outputs.skip();
        continue;
      }
    } else {
      careful_weights<T, kDim>(e, exponents, walk.scale, taken_out);
      multiply_vector<T, kDim>(sum, e, exponents.packed_w);
    }
    walk.put(e, sum, outputs);
  }
  const int last = warp_row + tiles * kStep;
  if (last < piece.count) {
    const RowWalk<T, kDim> tail = walk;
    tail.careful(last);
  }
}

}  // namespace lln::cuda
