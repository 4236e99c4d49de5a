// The backward pass over rows of causal LLN for 129 to 256 channels, by the formulas of
// tiled_causal_rows.cuh: dq, and for every row 1 / mass and delta. With K and s of the keys before
// a piece,
//   Z = s + tril(1) Eu,  X = g K^T + tril(g v^T) Eu      [rows, channels]
//   mass = Ea . Z,  delta = Ea . X / mass,  dq = alpha Ea / mass (X - delta Z).
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_rows_backward.cuh"
#include "cuda/tiled_wide_causal_walk.cuh"

namespace lln::cuda {

// X = g K^T + tril(g v^T) Eu. Sums of Eu over whole tiles of keys, in f32, are of this thread's
// rows and channels.
struct WideCausalGradientRows {
  static constexpr bool kTransposed = true, kUpTo = true, kLast = true;

  const DeviceCall& call;
  const CausalPiece& piece;
  const WideCausalKeys& keys;
  float scale;
  int tile, partners, columns, depth;
  float sums[8] = {};
  Largest largest_q, largest_k;

  __device__ void copy_rows(unsigned char* to, const Rows& tensor, int dim) const {
    const int count = piece.count;
    copy_wide_tokens(to, piece.rows<const Bf16>(tensor), tensor.token, tile * kChunk, dim,
                     [=](int row) { return row < count; });
  }
  __device__ void copy_own(unsigned char* to) const { copy_rows(to, call.g, depth); }
  __device__ void arrived_own(unsigned char*) const {}
  __device__ void copy_first(unsigned char* to, int partner) const { keys.copy_v(to, partner); }
  __device__ void arrived_first(unsigned char*, int) const {}
  __device__ void copy_second(unsigned char* to, int partner) const { keys.copy_k(to, partner); }
  __device__ void arrived_second(unsigned char* k_tile, int partner) {
    keys.raise(k_tile, partner, largest_k, [&](const uint4& words) {
      if (diagonal(partner)) return;
      const std::uint32_t x[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 e = unpack<Bf16>(x[i]);
        sums[2 * i] += e.x;
        sums[2 * i + 1] += e.y;
      }
    });
  }
  __device__ void copy_last(unsigned char* to) const { copy_rows(to, call.q, columns); }
  __device__ void arrived_last(unsigned char* q_tile) {
    each_own_piece(q_tile, [&](int, uint4& words) {
      see(largest_q, words);
      words = row_exponentials(words, scale, call.channels - wide_channel());
    });
  }
  __device__ void pairs(float (&)[2][2][4], int, int) const {}
  __device__ bool diagonal(int partner) const { return partner == tile; }
  __device__ void pairs_written(const unsigned char*, int) const {}
};

// Z = s + tril(1) Eu at 16 channels, all keys of earlier tiles being in `before`.
__device__ inline void add_wide_keys(float (&z)[2][2][4], const unsigned char* eu_tile,
                                     const float* before, int first, int channel) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    z[i / 8][i / 4 % 2][i % 4] = before[channel + i / 4 % 2 * 8 + 2 * (lane & 3) + i % 2];
  }
#pragma unroll 1
  for (int key = 0; key <= first + 16; key += 16) {
    std::uint32_t b[4];
    load_transposed(b, shared_address(eu_tile) + tile_offset<WideCausalShape::kDim>(
                                                     key + (lane & 15), channel / 8 + (lane >> 4)));
#pragma unroll
    for (int band = 0; band < 2; ++band) {
      if (key > first + 16 * band) continue;
      std::uint32_t ones[4];
      ones_up_to_row(ones, key == first + 16 * band);
      mma(z[band][0], ones, b[0], b[1]);
      mma(z[band][1], ones, b[2], b[3]);
    }
  }
}

// What is left of a tile of rows when X is there.
struct WideCausalFinish {
  using Shape = WideCausalShape;
  WideCausalShared& shared;
  const unsigned char *ea_tile, *eu_tile;
  WideCausalWarp warp;

  // s and sums over earlier tiles, of the threads of each channel; pairs have been read.
  __device__ void add_channels(const float (&sums)[8], const float* mass_before, int dim) const {
    auto* const parts = reinterpret_cast<float*>(shared.pairs);  // [rows of threads][channel]
    const int own = static_cast<int>(threadIdx.x);
#pragma unroll
    for (int i = 0; i < 8; ++i) parts[own / 32 * Shape::kDim + wide_channel() + i] = sums[i];
    __syncthreads();
    float sum = mass_before != nullptr && own < dim ? mass_before[own] : 0;
#pragma unroll
    for (int i = 0; i < Shape::kThreads / 32; ++i) sum += parts[i * Shape::kDim + own];
    shared.channels[own] = sum;
    __syncthreads();
  }

  // f(band, half, n, e, z): rows g + 8 half of a band, columns 8 n + 2 t and the next.
  template <class F>
  __device__ void each_pair(F&& f) const {
#pragma unroll
    for (int n = 0; n < Shape::kColumns / 8; n += 2) {
      const int channel = warp.column() + 8 * n;
      float z[2][2][4];
      add_wide_keys(z, eu_tile, shared.channels, warp.first, channel);
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const int band = i / 4, half = i / 2 % 2;
        const float2 e = natural_pair(ea_tile, warp.first + 16 * band, half, channel + i % 2 * 8);
        f(band, half, n + i % 2, e, z[band][i % 2] + 2 * half);
      }
    }
  }

  // Masses of the warp's rows, and Ea . X over all channels.
  __device__ void dots(float (&mass)[2][2], float (&product)[2][2],
                       const WideCausalSums& acc) const {
    each_pair([&](int band, int half, int n, const float2& e, const float* z) {
      const float* const x = acc[band][n] + 2 * half;
      mass[band][half] = fmaf(e.x, z[0], fmaf(e.y, z[1], mass[band][half]));
      product[band][half] = fmaf(e.x, x[0], fmaf(e.y, x[1], product[band][half]));
    });
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = warp.first + 16 * (i / 2) + (lane >> 2) + 8 * (i % 2);
      const float share = quad_sum(mass[i / 2][i % 2]), dot = quad_sum(product[i / 2][i % 2]);
      if ((lane & 3) == 0) {
        shared.rows[0][warp.group][row] = share;
        shared.rows[1][warp.group][row] = dot;
      }
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = warp.first + 16 * (i / 2) + (lane >> 2) + 8 * (i % 2);
      float share = 0, dot = 0;
#pragma unroll
      for (int group = 0; group < Shape::kGroups; ++group) {
        share += shared.rows[0][group][row];
        dot += shared.rows[1][group][row];
      }
      mass[i / 2][i % 2] = share;
      product[i / 2][i % 2] = dot;
    }
  }
};

// One block for 64 rows of a query head.
__global__ void __launch_bounds__(WideCausalShape::kThreads, 2)
    wide_causal_rows(const __grid_constant__ WideCausalCall wide) {
  LLN_DYNAMIC_SHARED(bytes);
  auto& shared = *reinterpret_cast<WideCausalShared*>(bytes);
  const DeviceCall& call = wide.causal.call;
  const WideCausalTile at;
  if (!share_piece(shared, find_causal_piece<false, kWideCausalPieceLog2>(call, at.piece),
                   at.tile)) {
    return;
  }
  const CausalPiece& piece = shared.piece;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  Bf16* const dq = piece.rows<Bf16>(call.dq);
  if (piece.first && at.tile == 0) {
    zero_rows_before(dq, call.dq.token, piece.sequence.key_first, dim);
  }
  const WideCausalKeys keys(call, piece);
  const std::int64_t slot = piece.slot * call.heads_k + piece.head_k;
  const float alpha = scale_at(call.alpha, piece.s, piece.head);
  WideCausalGradientRows parts{call, piece, keys, alpha * kLog2E, at.tile, at.tile + 1, dim, dim_v};
  const WideCausalMatrix matrix(wide, slot, !piece.first);
  WideCausalSums x = {};
  multiply_wide_causal(parts, matrix, shared, x);
  // The last tile but one is that of the keys on the diagonal.
  const int last = matrix.slabs<true>() + 2 * parts.partners;
  const WideCausalFinish finish{shared, shared.stages[last & 1], shared.stages[(last + 1) & 1], {}};
  finish.add_channels(parts.sums, piece.first ? nullptr : wide.masses + slot * dim, dim);
  float mass[2][2] = {}, product[2][2] = {};
  finish.dots(mass, product, x);
  const RowFactor factor = row_factor(call.lln_weight, piece.sequence, piece.head);
  const std::int64_t statistics = statistics_at(wide.causal, piece, piece.head);
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    float &inverse = mass[i / 2][i % 2], &delta = product[i / 2][i % 2];
    const int row = at.tile * kChunk + finish.warp.first + 16 * (i / 2) + (lane >> 2) + 8 * (i % 2);
    inverse = inverse == 0 ? 0 : 1 / inverse;
    delta *= inverse;
    inverse *= factor(piece.begin + min(row, piece.count - 1));
    if (finish.warp.group == 0 && (lane & 3) == 0 && row < piece.count) {
      wide.causal.inverse[statistics + row] = inverse;
      wide.causal.delta[statistics + row] = delta;
    }
  }
  finish.each_pair([&](int band, int half, int n, const float2& e, const float* z) {
    float* const own = x[band][n] + 2 * half;
    const float times = alpha * mass[band][half], delta = product[band][half];
    own[0] = times * e.x * fmaf(-delta, z[0], own[0]);
    own[1] = times * e.y * fmaf(-delta, z[1], own[1]);
  });
  Largest largest_dq;
#pragma unroll
  for (int band = 0; band < WideCausalShape::kBands; ++band) {
    store_natural(dq, call.dq.token, at.tile * kChunk + finish.warp.first + 16 * band, piece.count,
                  finish.warp.column(), dim, x[band], largest_dq);
  }
  report_reach(wide.causal, piece,
               parts.largest_q.at_most(kLargestModerate / fabsf(parts.scale)) &&
                   parts.largest_k.at_most(kLargestModerate / fabsf(keys.scale)) &&
                   largest_dq.at_most(kLargestBf16));
}

}  // namespace lln::cuda
