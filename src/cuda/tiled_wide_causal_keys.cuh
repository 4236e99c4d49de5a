// Keys of causal LLN for 129 to 256 channels in the backward pass, by the formulas of
// tiled_causal_keys.cuh. With Y = Ea / mass of rows, G = sum Y (x) g and T = sum Y delta over all
// rows of later pieces,
//   dv = triu(Eu Y^T) g + Eu G,   dk = beta Eu (triu(v g^T - delta) Y + v G^T - T).
// The registers of a block hold one of the two.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_wide_causal_walk.cuh"

namespace lln::cuda {

// The tiles of rows that 64 keys of a piece meet: their own and those behind, head after head.
struct WideCausalPartners {
  int tile, tiles, heads;
  std::int64_t first_head;

  __device__ WideCausalPartners(const DeviceCall& call, const CausalPiece& piece, int own)
      : tile(own),
        tiles((piece.count + kChunk - 1) / kChunk - own),
        heads(static_cast<int>(static_cast<std::uint32_t>(call.heads) /
                               static_cast<std::uint32_t>(call.heads_k))),
        first_head(piece.head) {}
  __device__ int count() const { return tiles * heads; }
  __device__ int tile_of(int partner) const { return tile + partner % tiles; }
  __device__ std::int64_t head_of(int partner) const { return first_head + partner / tiles; }
};

// dv.
struct WideCausalValues {
  static constexpr bool kTransposed = false, kUpTo = false, kLast = false;

  const DeviceCall& call;
  const WideCausalKeys& keys;
  const WideCausalRows& rows;
  const WideCausalPartners& at;
  int partners, columns, depth;
  Largest largest;  // of keys, which the kernels of rows judge

  __device__ void copy_own(unsigned char* to) const { keys.copy_k(to, at.tile); }
  __device__ void arrived_own(unsigned char* k_tile) {
    keys.raise(k_tile, at.tile, largest, [](const uint4&) {});
  }
  __device__ void copy_first(unsigned char* to, int partner) const {
    rows.copy(to, call.q, at.head_of(partner), at.tile_of(partner), call.dim);
  }
  __device__ void arrived_first(unsigned char* q_tile, int partner) const {
    rows.weigh(q_tile, at.head_of(partner), at.tile_of(partner));
  }
  __device__ void copy_second(unsigned char* to, int partner) const {
    rows.copy(to, call.g, at.head_of(partner), at.tile_of(partner), call.dim_v);
  }
  __device__ void arrived_second(unsigned char*, int) const {}
  __device__ void copy_last(unsigned char*) const {}
  __device__ void pairs(float (&)[2][2][4], int, int) const {}
  __device__ bool diagonal(int partner) const { return at.tile_of(partner) == at.tile; }
  __device__ void pairs_written(const unsigned char*, int) const {}
};

// dk over beta Eu, but for T.
struct WideCausalChannels {
  static constexpr bool kTransposed = true, kUpTo = false, kLast = true;

  const DeviceCall& call;
  const WideCausalKeys& keys;
  const WideCausalRows& rows;
  const WideCausalPartners& at;
  int partners, columns, depth;
  Largest largest;  // of keys, which the kernels of rows judge

  __device__ void copy_own(unsigned char* to) const { keys.copy_v(to, at.tile); }
  __device__ void arrived_own(unsigned char*) const {}
  __device__ void copy_first(unsigned char* to, int partner) const {
    rows.copy(to, call.g, at.head_of(partner), at.tile_of(partner), call.dim_v);
  }
  __device__ void arrived_first(unsigned char*, int) const {}
  __device__ void copy_second(unsigned char* to, int partner) const {
    rows.copy(to, call.q, at.head_of(partner), at.tile_of(partner), call.dim);
  }
  __device__ void arrived_second(unsigned char* q_tile, int partner) const {
    rows.weigh(q_tile, at.head_of(partner), at.tile_of(partner));
  }
  __device__ void copy_last(unsigned char* to) const { keys.copy_k(to, at.tile); }
  __device__ void arrived_last(unsigned char* k_tile) {
    keys.raise(k_tile, at.tile, largest, [](const uint4&) {});
  }
  // v g^T - delta, rounded as the walk over rows had v g^T when it made delta: the difference is 0
  // where a row sees one key.
  __device__ void pairs(float (&x)[2][2][4], int partner, int column) const {
    const CausalCall& causal = rows.wide.causal;
    const float* const delta =
        causal.delta + statistics_at(causal, keys.piece, at.head_of(partner));
    const int first = at.tile_of(partner) * kChunk + column + 2 * static_cast<int>(threadIdx.x & 3);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = first + i / 2 * 8 + i % 2;
      const float taken = row < keys.piece.count ? delta[row] : 0;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        float& product = x[j / 2][i / 2][j % 2 * 2 + i % 2];
        product = unpack<Bf16>(pack<Bf16>(product, 0)).x - taken;
      }
    }
  }
  __device__ bool diagonal(int partner) const { return at.tile_of(partner) == at.tile; }
  __device__ void pairs_written(const unsigned char*, int) const {}
};

// The piece of a block's 64 keys: those with the most pairs first.
struct WideCausalKeyTile {
  int tile;
  bool there;
  const CausalPiece& piece;
  std::int64_t slot;  // of the sums over later pieces

  __device__ WideCausalKeyTile(const DeviceCall& call, WideCausalShared& shared)
      : tile(static_cast<int>(blockIdx.x % kWideCausalTiles)),
        there(share_piece(
            shared,
            find_causal_piece<true, kWideCausalPieceLog2>(call, blockIdx.x / kWideCausalTiles),
            tile)),
        piece(shared.piece),
        slot(there ? (piece.slot + 1) * call.heads_k + piece.head_k : 0) {}

  // Results of the warp's keys, and zeros for those before the first valid one.
  __device__ bool store(const Rows& tensor, std::int64_t dim, const WideCausalSums& acc) const {
    Bf16* const to = piece.keys<Bf16>(tensor);
    if (piece.first && tile == 0) {
      zero_rows_before(to, tensor.token, piece.sequence.key_first, static_cast<int>(dim));
    }
    const WideCausalWarp warp;
    Largest largest;
#pragma unroll
    for (int band = 0; band < WideCausalShape::kBands; ++band) {
      store_natural(to, tensor.token, tile * kChunk + warp.first + 16 * band, piece.count,
                    warp.column(), static_cast<int>(dim), acc[band], largest);
    }
    return largest.at_most(kLargestBf16);
  }
};

// One block for 64 keys of a key head: dv.
__global__ void __launch_bounds__(WideCausalShape::kThreads, 2)
    wide_causal_values(const __grid_constant__ WideCausalCall wide) {
  LLN_DYNAMIC_SHARED(bytes);
  auto& shared = *reinterpret_cast<WideCausalShared*>(bytes);
  const DeviceCall& call = wide.causal.call;
  const WideCausalKeyTile own(call, shared);
  if (!own.there) return;
  const WideCausalPartners at(call, own.piece, own.tile);
  const WideCausalKeys keys(call, own.piece);
  const WideCausalRows rows{wide, own.piece};
  WideCausalValues parts{
      call, keys, rows, at, at.count(), static_cast<int>(call.dim_v), static_cast<int>(call.dim),
      {}};
  const WideCausalMatrix matrix(wide, own.slot, !own.piece.last);
  WideCausalSums acc = {};
  multiply_wide_causal(parts, matrix, shared, acc);
  report_reach(wide.causal, own.piece, own.store(call.dv, call.dim_v, acc));
}

// One block for 64 keys of a key head: dk.
__global__ void __launch_bounds__(WideCausalShape::kThreads, 2)
    wide_causal_keys(const __grid_constant__ WideCausalCall wide) {
  LLN_DYNAMIC_SHARED(bytes);
  auto& shared = *reinterpret_cast<WideCausalShared*>(bytes);
  const DeviceCall& call = wide.causal.call;
  const WideCausalKeyTile own(call, shared);
  if (!own.there) return;
  const int dim = static_cast<int>(call.dim);
  const WideCausalPartners at(call, own.piece, own.tile);
  const WideCausalKeys keys(call, own.piece);
  const WideCausalRows rows{wide, own.piece};
  WideCausalChannels parts{call, keys, rows, at, at.count(), dim, static_cast<int>(call.dim_v), {}};
  const WideCausalMatrix matrix(wide, own.slot, !own.piece.last);
  WideCausalSums acc = {};
  multiply_wide_causal(parts, matrix, shared, acc);
  const unsigned char* const eu_tile =
      shared.stages[(matrix.slabs<true>() + 2 * parts.partners) & 1];
  const float* const sums = own.piece.last ? nullptr : wide.masses + own.slot * dim;
  const float beta = scale_at(call.beta, own.piece.s, own.piece.head_k);
  const WideCausalWarp warp;
#pragma unroll
  for (int n = 0; n < WideCausalShape::kColumns / 8; ++n) {
    const int channel = warp.column() + 8 * n + 2 * static_cast<int>(threadIdx.x & 3);
    const float2 taken = sums != nullptr && channel < dim
                             ? *reinterpret_cast<const float2*>(sums + channel)
                             : float2{0, 0};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int band = i / 2, half = i % 2;
      const float2 e = natural_pair(eu_tile, warp.first + 16 * band, half, warp.column() + 8 * n);
      float* const x = acc[band][n] + 2 * half;
      x[0] = beta * e.x * (x[0] - taken.x);
      x[1] = beta * e.y * (x[1] - taken.y);
    }
  }
  report_reach(wide.causal, own.piece, own.store(call.dk, call.dim, acc));
}

}  // namespace lln::cuda
