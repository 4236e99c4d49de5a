// The forward pass over rows of LLN: weights in registers, then one product with C, which stays in
// shared memory. q comes from memory and o goes there directly.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/row_source.cuh"
#include "cuda/tiled_weights.cuh"

namespace lln::cuda {

inline constexpr int kRowsThreads = 128;

inline constexpr int kRowsWarps = kRowsThreads / 32;

template <int kDim, class T>
using QuerySource = RowSource<kDim, kDim <= 128 ? 3 : 2, T>;
template <int kDim>
inline constexpr int kRowsShared = kOperandBytes<kDim, kDim> + sizeof(RowExponents<kDim>) +
                                   kRowsWarps* QuerySource<kDim, Bf16>::kBytes;

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

// The rows of a row job and query head. s is -1 where there is no such job.
__device__ inline RowPiece find_rows(const DeviceCall& call, std::uint32_t job,
                                     std::uint32_t head) {
  RowPiece piece;
  piece.head = head;
  piece.head_k =
      head / (static_cast<std::uint32_t>(call.heads) / static_cast<std::uint32_t>(call.heads_k));
  const JobPlace place = find_job<false>(call.sequences, job);
  piece.s = place.s;
  piece.sequence = place.sequence;
  const std::int64_t tokens = call.sequences.q_jobs.piece(place.sequence.q_tokens);
  piece.begin = place.index * tokens;
  piece.count = static_cast<int>(min(tokens, place.sequence.q_tokens - piece.begin));
  return piece;
}
// One block per row job and query head.
__device__ inline RowPiece find_rows(const DeviceCall& call, std::uint32_t block) {
  const auto heads = static_cast<std::uint32_t>(call.heads);
  return find_rows(call, block / heads, block % heads);
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

  // Rows of o from e and its sums.
  __device__ void write(const RowWords<kDim>& e, const float (&sum)[4], int row) const {
    const float inverse[2] = {inverse_of(sum[0]), inverse_of(sum[2])};
#pragma unroll
    for (int pass = 0; pass < kPasses; ++pass) {
      float acc[kWidth / 8][4] = {};
      multiply<T, kDim, kWidth>(acc, e, operand + pass * kOperandBytes<kDim, kWidth> / 16);
#pragma unroll
      for (int n = 0; n < kWidth / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) acc[n][i] *= inverse[i >> 1];
      }
      store_rows<kWidth>(o + pass * kWidth, o_stride, row, count, dim_v - pass * kWidth, acc);
    }
  }

  // 16 rows from scratch. Not inlined: it is for rare rows, and its registers would be everybody's.
  __device__ __noinline__ void careful(int row) const {
    RowWords<kDim> e;
    load_rows<kDim>(e, q, q_stride, row, count, dim);
    careful_weights<T, kDim>(e, exponents, scale, taken_out);
    float sum[4] = {};
    multiply_vector<T, kDim>(sum, e, exponents.packed_w);
    write(e, sum, row);
  }
};

template <class T, int kDim>
__global__ void __launch_bounds__(kRowsThreads, kDim <= 64    ? 4
                                                : kDim == 128 ? 2
                                                              : 1)
    rows_forward(const __grid_constant__ TiledCall tiled) {
  using Walk = RowWalk<T, kDim>;
  constexpr int kStep = 16 * kRowsWarps;
  LLN_DYNAMIC_SHARED(shared);
  uint4* const operand = reinterpret_cast<uint4*>(shared);
  auto& exponents = *reinterpret_cast<RowExponents<kDim>*>(shared + kOperandBytes<kDim, kDim>);
  const DeviceCall& call = tiled.call;
  const RowPiece piece = find_rows(call, blockIdx.x);
  if (piece.s < 0) return;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const T* const q = piece.rows<T>(call.q);
  const int warp = static_cast<int>(threadIdx.x) >> 5;
  using Source = QuerySource<kDim, T>;
  Source source(reinterpret_cast<unsigned char*>(&exponents + 1) + warp * Source::kBytes, q,
                call.q.token, 16 * warp, kStep, piece.count, dim);
  wait_for_previous();
  let_next_start();

  const float* const values = tiled.state.values_at(piece.s, piece.head_k);
  using Fill = OperandFill<T, kDim, Walk::kWidth, kRowsThreads>;
  const Fill first(values, tiled.state.row, dim, dim_v);
  const float taken_out = fill_exponents<T, kDim>(
      exponents, tiled.state.c_at(piece.s, piece.head_k), dim, call.channels);
  const auto weight_of = [&](int l, int) { return exponents.w[l]; };
  first.template write<Columns::direct>(operand, weight_of);
#pragma unroll
  for (int pass = 1; pass < Walk::kPasses; ++pass) {
    const Fill more(values + pass * Walk::kWidth, tiled.state.row, dim,
                    dim_v - pass * Walk::kWidth);
    more.template write<Columns::direct>(operand + pass * kOperandBytes<kDim, Walk::kWidth> / 16,
                                         weight_of);
  }
  __syncthreads();
  const Walk walk{operand,
                  exponents,
                  q,
                  piece.rows<T>(call.o),
                  call.q.token,
                  call.o.token,
                  piece.count,
                  dim,
                  dim_v,
                  scale_at(call.alpha, piece.s, piece.head) * kLog2E,
                  taken_out};
  for (int row = 16 * warp; row < piece.count; row += kStep) {
    RowWords<kDim> e;
    float sum[4] = {};
    source.take(e);
    if constexpr (std::is_same_v<T, Bf16>) {
      moderate_weights<T, kDim>(e, walk.scale);
      multiply_vector<T, kDim>(sum, e, exponents.packed_w);
      if (!trusted(sum, exponents)) {
        const Walk again = walk;  // a call by reference would keep it in memory
        again.careful(row);
        continue;
      }
    } else {
      careful_weights<T, kDim>(e, exponents, walk.scale, taken_out);
      multiply_vector<T, kDim>(sum, e, exponents.packed_w);
    }
    walk.write(e, sum, row);
  }
}

}  // namespace lln::cuda
