// The first backward walk of causal LLN and LLN+Diag, from the first chunk of a piece to the last:
// dq, and for every row 1 / mass and delta. With K, s before the chunk (tiled_causal_forward.cuh)
//   Z = s + tril(1) Eu,  X = g K^T + tril(g v^T) Eu      [rows, channels]
//   mass = Ea . Z,  delta = Ea . X / mass,  dq = alpha Ea / mass (X - delta Z).
// Where a sequence has several pieces it also sums G = Y^T g and T = Y^T delta, Y = Ea / mass.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_causal_chunks.cuh"
#include "cuda/tiled_causal_diag.cuh"

namespace lln::cuda {

template <int kDim>
struct CausalRowsShape : CausalShape<kDim> {
  using Base = CausalShape<kDim>;
  static constexpr int kStages = 2;
  static constexpr int kStageBytes = 4 * Base::kTileBytes;  // q, k, v, g
  // Eu, K, s, masses and products of half rows, delta.
  static constexpr int kShared = kStages * kStageBytes + Base::kTileBytes + Base::kStateBytes +
                                 (kDim + 4 * kChunk + kChunk) * 4;
};

// X and Z of 16 rows at 64 channels; Z comes in as s.
template <int kDim>
__device__ inline void row_products(float (&x)[8][4], float (&z)[8][4], int first, int channel,
                                    const unsigned char* g_tile, const unsigned char* v_tile,
                                    const unsigned char* eu_tile, const unsigned char* state) {
  const int lane = threadIdx.x & 31;
  std::uint32_t g[4];
#pragma unroll
  for (int step = 0; step < kDim / 16; ++step) {
    load_left<kDim>(g, g_tile, first, step);
    multiply_by_tile_rows<kDim>(x, g, state, channel, step);
  }
#pragma unroll
  for (int key = 0; key < kChunk; key += 16) {
    if (key > first) continue;
    float products[2][4] = {};
#pragma unroll
    for (int step = 0; step < kDim / 16; ++step) {
      load_left<kDim>(g, g_tile, first, step);
      multiply_by_tile_rows<kDim>(products, g, v_tile, key, step);
    }
    if (key == first) mask_diagonal(products);
    std::uint32_t y[4], ones[4];
    pack_left(y, products);
    ones_up_to_row(ones, key == first);
#pragma unroll
    for (int n = 0; n < 8; n += 2) {
      std::uint32_t b[4];
      load_transposed(b, shared_address(eu_tile) +
                             tile_offset<kDim>(key + (lane & 15), channel / 8 + n + (lane >> 4)));
      mma(x[n], y, b[0], b[1]);
      mma(x[n + 1], y, b[2], b[3]);
      mma(z[n], ones, b[0], b[1]);
      mma(z[n + 1], ones, b[2], b[3]);
    }
  }
}

// Ea . x of rows g and g + 8 over 64 channels, in all lanes of a quad.
__device__ inline void dot_rows(float (&sum)[2], const RowOperand<64>& ea, const float (&x)[8][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    sum[half] = 0;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 e = unpack<Bf16>(ea[n / 2][2 * (n & 1) + half]);
      sum[half] = fmaf(e.x, x[n][2 * half], fmaf(e.y, x[n][2 * half + 1], sum[half]));
    }
    sum[half] = quad_sum(sum[half]);
  }
}

// Sums over the two halves of the channels, which different warps have.
__device__ inline void add_halves(float (&mass)[2], float (&product)[2], float* halves, int first,
                                  int half) {
  const int lane = threadIdx.x & 31;
  float* const masses = halves + first + (lane >> 2);
  float* const products = masses + 2 * kChunk;
  if ((lane & 3) == 0) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      masses[half * kChunk + 8 * i] = mass[i];
      products[half * kChunk + 8 * i] = product[i];
    }
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    mass[i] = masses[8 * i] + masses[kChunk + 8 * i];
    product[i] = products[8 * i] + products[kChunk + 8 * i];
  }
}

// One block per piece and query head. kSums: also the sums G and T of the piece.
template <int kDim, bool kDiag, bool kSums>
__global__ void __launch_bounds__(2 * kDim, kDim <= 64 ? 2 : 1)
    causal_rows(const __grid_constant__ CausalCall causal) {
  using Shape = CausalRowsShape<kDim>;
  LLN_DYNAMIC_SHARED(shared);
  unsigned char* const eu_tile = shared + Shape::kStages * Shape::kStageBytes;
  unsigned char* const state_tile = eu_tile + Shape::kTileBytes;
  float* const state_mass = reinterpret_cast<float*>(state_tile + Shape::kStateBytes);
  float* const halves = state_mass + kDim;       // [mass, product][half][row]
  float* const row_delta = halves + 4 * kChunk;  // [row]
  const DeviceCall& call = causal.call;
  const CausalPiece piece = find_causal_piece<false>(call);
  if (piece.s < 0) return;
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const int warp = warp_index(), lane = threadIdx.x & 31, t = lane & 3;
  const int first = 16 * (warp & 3), channel = 64 * (warp >> 2);  // of this warp
  const KeyChunks<kDim> keys(call, piece);
  const Bf16* const q = piece.rows<const Bf16>(call.q);
  const Bf16* const g = piece.rows<const Bf16>(call.g);
  Bf16* const dq = piece.rows<Bf16>(call.dq);
  const int chunks = (piece.count + kChunk - 1) / kChunk;
  const auto start = [&](int chunk) {
    if (chunk < chunks) {
      unsigned char* const stage = shared + chunk % Shape::kStages * Shape::kStageBytes;
      const int at = chunk * kChunk;
      keys.copy(stage + Shape::kTileBytes, stage + 2 * Shape::kTileBytes, at);
      copy_chunk<kDim>(stage, q, call.q.token, at, piece.count, dim);
      copy_chunk<kDim>(stage + 3 * Shape::kTileBytes, g, call.g.token, at, piece.count, dim_v);
    }
    copy_commit();
  };
  for (int chunk = 0; chunk < Shape::kStages - 1; ++chunk) start(chunk);
  if (piece.first) zero_rows_before(dq, call.dq.token, piece.sequence.key_first, dim);
  ChannelRows<kDim> state, sums;
  if (!piece.first) {
    state.read(causal.before, piece.slot * call.heads_k + piece.head_k, dim, dim_v);
  }
  const float alpha = scale_at(call.alpha, piece.s, piece.head);
  const float beta = scale_at(call.beta, piece.s, piece.head_k) * kLog2E;
  const CausalWeights weights(call, piece);
  const std::int64_t statistics = statistics_at(causal, piece, piece.head);
  Largest largest_q, largest_k, largest_dq;
  for (int chunk = 0; chunk < chunks; ++chunk) {
    copy_wait<Shape::kStages - 2>();
    __syncthreads();
    start(chunk + Shape::kStages - 1);
    unsigned char* const stage = shared + chunk % Shape::kStages * Shape::kStageBytes;
    unsigned char* const k_tile = stage + Shape::kTileBytes;
    unsigned char* const v_tile = k_tile + Shape::kTileBytes;
    const unsigned char* const g_tile = v_tile + Shape::kTileBytes;
    const std::uint64_t valid = keys.valid(chunk * kChunk);
    if (keys.masked(valid)) clear_masked<kDim>(k_tile, v_tile, valid);
    const int row = chunk * kChunk + first;
    write_exponentials<kDim>(eu_tile, k_tile, beta, valid, largest_k);
    state.write_tile(state_tile);
    if (t == 0) {
      state_mass[state.channel(0)] = state.mass[0];
      state_mass[state.channel(1)] = state.mass[2];
    }
    std::uint32_t diag[8][2];
    if constexpr (kDiag) {
      diag_row_gradients<kDim>(diag, stage, first, channel, valid, causal, weights, piece, row,
                               statistics);
    }
    RowOperand<64> ea;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      load_left<kDim>(ea[step], stage, first, channel / 16 + step);
#pragma unroll
      for (int i = 0; i < 4; ++i) largest_q.see(ea[step][i]);
    }
    row_exponentials<64>(ea, alpha * kLog2E, dim - channel);
    if (call.channels < dim) clear_row_padding<64>(ea, call.channels - channel);
    __syncthreads();
    float x[8][4] = {}, z[8][4];
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 s = *reinterpret_cast<const float2*>(state_mass + channel + 8 * n + 2 * t);
      z[n][0] = z[n][2] = s.x;
      z[n][1] = z[n][3] = s.y;
    }
    row_products<kDim>(x, z, first, channel, g_tile, v_tile, eu_tile, state_tile);
    float mass[2], product[2];
    dot_rows(mass, ea, z);
    dot_rows(product, ea, x);
    if constexpr (Shape::kHalves > 1) add_halves(mass, product, halves, first, warp >> 2);
    float inverse[2], delta[2], factor[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      inverse[half] = mass[half] == 0 ? 0 : 1 / mass[half];
      delta[half] = product[half] * inverse[half];
      factor[half] = kDiag ? weights.lln_at(piece, row, half) : 1;
      inverse[half] *= factor[half];
      const int own = row + (lane >> 2) + 8 * half;
      if (channel == 0 && t == 0) {
        if (own < piece.count) {
          causal.inverse[statistics + own] = inverse[half];
          causal.delta[statistics + own] = delta[half];
        }
        if constexpr (kSums) row_delta[first + (lane >> 2) + 8 * half] = delta[half];
      }
    }
#pragma unroll
    for (int n = 0; n < 8; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t& word = ea[n / 2][2 * (n & 1) + half];
        const float2 e = unpack<Bf16>(word);
        const float2 y = {e.x * inverse[half], e.y * inverse[half]};
        if constexpr (kSums) word = pack<Bf16>(y.x, y.y);
        float* const own = x[n] + 2 * half;
        own[0] = alpha * y.x * fmaf(-delta[half], z[n][2 * half], own[0]);
        own[1] = alpha * y.y * fmaf(-delta[half], z[n][2 * half + 1], own[1]);
        if constexpr (kDiag) {
          const float2 part = unpack<Bf16>(diag[n][half]);
          own[0] += part.x;
          own[1] += part.y;
        }
      }
    }
    store_natural(dq, call.dq.token, row, piece.count, channel, dim, x, largest_dq);
    if constexpr (kSums) {
      if (!piece.first) {
        write_left<kDim>(stage, ea, first, channel);
        __syncthreads();
        add_chunk<kDim>(sums, stage, g_tile, row_delta);
      }
    }
    add_chunk<kDim>(state, eu_tile, v_tile);
  }
  if constexpr (kSums) {
    if (!piece.first) {
      sums.fold_mass();
      sums.write(causal.behind, piece.slot * call.heads + piece.head, dim, dim_v);
    }
  }
  report_reach(causal, piece,
               largest_q.at_most(kLargestModerate / fabsf(alpha * kLog2E)) &&
                   largest_k.at_most(kLargestModerate / fabsf(beta)) &&
                   largest_dq.at_most(kLargestBf16));
}

}  // namespace lln::cuda
