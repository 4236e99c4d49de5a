// What a warpgroup does with a tile in the second backward pass of LLN+Diag on Hopper
// (diag_backward.cuh). rows_backward.cuh and keys_backward.cuh have the formulas of LLN. With
// S = q k^T, D = g v^T and, of each row, delta = P . D:
//   dS = w2 P (D - delta) / sqrt(dim),  dq += dS k,  dk += dS^T q,  dv += (w2 P)^T g.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sm90/diag_tiles.cuh"
#include "cuda/sm90/keys_backward.cuh"
#include "cuda/sm90/rows_backward.cuh"
#include "cuda/tiled_diag_split.cuh"

namespace lln::cuda::sm90 {

template <int kDim>
struct DiagBackwardShape {
  static constexpr int kParts = kDim / kPanelChannels;  // warpgroups that share a tile
  static constexpr int kTeams = kDim == 64 ? 2 : 1;     // that take tiles in turn
  static constexpr int kGroups = kParts * kTeams, kTeamThreads = 128 * kParts;
  static constexpr int kConsumers = 128 * kGroups, kThreads = kConsumers + kProducerThreads;
  static constexpr int kTileBytes = kTileRows * kDim * 2;
  static constexpr int kSlots = 2;              // of each team
  static constexpr int kCopyingRegisters = 40;  // of the threads that copy and send
  // A warp copies for each team, another sends its results.
  static_assert(2 * kTeams <= kProducerThreads / 32);

  using RowSums = typename RowsBackwardShape<kDim>::RowSums;
  using Operand = typename RowsBackwardShape<kDim>::Operand;
  struct alignas(1024) Pairs {
    unsigned char p[kPanelBytes], ds[kPanelBytes];  // [row, key]: w2 P, dS
  };
  struct alignas(1024) Shared {
    unsigned char tiles[kTeams][kSlots][4][kTileBytes];  // q, g, k, v
    unsigned char operand[kDim * kDim * 2];              // C
    unsigned char sums[kDim * kDim * 2];                 // dC
    Pairs pairs[kTeams];
    RowSums exchanged[2][kTeams][kParts][kTileRows];
    RowExponents<kDim> exponents;
    KeyVectors<kDim> vectors;
    RingBarriers<kSlots> rings[kTeams];
    Barrier done[kTeams][kSlots];  // results are in place of the tiles
  };
};

// Scores of rows and D to w2 P and dS, as left operands. `scale` makes scores exponents of 2.
__device__ inline void block_gradients(std::uint32_t (&p)[4][4], std::uint32_t (&ds)[4][4],
                                       float (&scores)[kTileRows / 8][4],
                                       const float (&dots)[kTileRows / 8][4], float scale,
                                       const float (&weight)[2]) {
  float top[2], mass[2] = {}, delta[2] = {}, factor[2];
  find_tops(top, scores);
  const float shift[2] = {-top[0] * scale, -top[1] * scale};
#pragma unroll
  for (int n = 0; n < kTileRows / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      scores[n][i] = exp2_fast(fmaf(scores[n][i], scale, shift[i >> 1]));
      mass[i >> 1] += scores[n][i];
      delta[i >> 1] = fmaf(scores[n][i], dots[n][i], delta[i >> 1]);
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float inverse = quick_inverse(quad_sum(mass[half]));
    delta[half] = quad_sum(delta[half]) * inverse;
    factor[half] = inverse * weight[half];
  }
  const float inverse_root = scale * kLn2;
#pragma unroll
  for (int n = 0; n < kTileRows / 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float low = scores[n][2 * half] * factor[half];
      const float high = scores[n][2 * half + 1] * factor[half];
      const float* const dot = dots[n] + 2 * half;
      p[n / 2][2 * (n % 2) + half] = pack<Bf16>(low, high);
      ds[n / 2][2 * (n % 2) + half] = pack<Bf16>(low * ((dot[0] - delta[half]) * inverse_root),
                                                 high * ((dot[1] - delta[half]) * inverse_root));
    }
  }
}

// A tile of 64 tokens for one warpgroup.
template <int kDim>
struct DiagBackwardGroup : RowsBackwardGroup<kDim, DiagBackwardShape<kDim>> {
  using Shape = DiagBackwardShape<kDim>;
  using Base = RowsBackwardGroup<kDim, Shape>;
  using Base::alpha;
  using Base::exchange;
  using Base::first;
  using Base::part;
  using Base::shared;
  using Base::taken_out;
  using Base::team;
  using Tiles = unsigned char[4][Shape::kTileBytes];

  float beta = 0;
  bool folded = false;

  __device__ explicit DiagBackwardGroup(typename Shape::Shared& memory) : Base(memory) {}

  __device__ void meet_team() const { meet(kTeamMeets + team, Shape::kTeamThreads); }

  // Rows and keys that do not count become zeros: what they hold may be anything, and 0 times that
  // is not 0. Not v: its rows meet none but their own results, which are set to 0.
  __device__ void clear(Tiles& tiles, std::uint64_t valid, int count) const {
    constexpr int kThreads = Shape::kTeamThreads;
    if (valid == ~std::uint64_t{0}) return;
    clear_rows<kDim, kThreads>(tiles[2], valid, kTeamMeets + team);
    if (count == kTileRows) return;
    clear_rows<kDim, kThreads>(tiles[0], low_bits(count), kTeamMeets + team);
    clear_rows<kDim, kThreads>(tiles[1], low_bits(count), kTeamMeets + team);
  }

  // dW = g C^T becomes dq of LLN; e is that of reference 0. q: the rows in memory.
  __device__ void row_gradients(float (&dw)[8][4], std::uint32_t (&e)[4][4], const Bf16* q,
                                std::int64_t stride, int count, int dim,
                                const float (&factor)[2]) const {
    this->weigh(dw);
    float mass[2], dot[2];
    this->sum_rows(e, dw, mass, dot);
    exchange(mass, dot, 0, kTeamMeets + team, Shape::kTeamThreads);
    const float sum[4] = {mass[0], 0, mass[1], 0};
    if (!trusted(sum, shared.exponents)) {
      // Nobody reads the pairs of the tile before any more.
      unsigned char* const again = shared.pairs[team].p;
      careful_tile<kDim>(again, first, part, part + 1, q, stride, count, dim, shared.exponents,
                         alpha * kLog2E, taken_out);
      read_fragments(e, again + part * kPanelBytes, first);
      this->sum_rows(e, dw, mass, dot);
      exchange(mass, dot, 1, kPairMeets + first / 16, 64);
    }
    const float inverse[2] = {inverse_of(mass[0]), inverse_of(mass[1])};
    const float delta[2] = {dot[0] * inverse[0], dot[1] * inverse[1]};
    const float share[2] = {inverse[0] * factor[0], inverse[1] * factor[1]};
    this->finish(e, dw, share, delta, kTileRows);
  }

  // Starts v dC^T in `dk` and Kn dC, added to dv.
  __device__ void start_keys(float (&dk)[8][4], float (&dv)[8][4],
                             const std::uint32_t (&kn)[kDim / 16][4], const unsigned char* v_tile,
                             bool accumulate) const {
    begin_products();
    multiply<kDim / 16>(dk, ByRows<kTileRows>(v_tile, 0),
                        ByRows<kDim>(shared.sums, part * kPanelChannels), false);
    multiply_words(dv, kn, ByColumns<kDim>(shared.sums, part * kPanelChannels), accumulate);
    commit_products();
  }

  // v dC^T becomes dk of LLN.
  __device__ void key_gradients(float (&dk)[8][4], const std::uint32_t (&kn)[kDim / 16][4]) const {
    const float* const t =
        shared.vectors.t_sums + part * kPanelChannels + 2 * (static_cast<int>(threadIdx.x) & 3);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 sum = *reinterpret_cast<const float2*>(t + 8 * n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int word = 2 * (n % 2) + half;
        const std::uint32_t high = kn[kDim / 16 - 4 + n / 2][word];
        const float2 weight = unpack<Bf16>(part == 0 ? kn[n / 2][word] : high);
        float* const x = dk[n] + 2 * half;
        x[0] = beta * weight.x * (x[0] - sum.x);
        x[1] = beta * weight.y * (x[1] - sum.y);
      }
    }
  }

  // w2 P and dS to where all warps of the team read them; where two groups have them, each writes
  // one.
  __device__ void put_pairs(const std::uint32_t (&p)[4][4], const std::uint32_t (&ds)[4][4]) const {
    const int lane = threadIdx.x & 31;
    const std::uint32_t at = shared_address(shared.pairs[team].p);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      const std::uint32_t to =
          at + panel_offset<kTileRows>(first + (lane & 15), 2 * step + (lane >> 4));
      if constexpr (Shape::kParts == 1) {
        store_matrices(to, p[step][0], p[step][1], p[step][2], p[step][3]);
        store_matrices(to + kPanelBytes, ds[step][0], ds[step][1], ds[step][2], ds[step][3]);
      } else {
        std::uint32_t own[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) own[i] = part == 0 ? p[step][i] : ds[step][i];
        store_matrices(to + part * kPanelBytes, own[0], own[1], own[2], own[3]);
      }
    }
  }

  // Adds the block's part to dq, dk and dv.
  __device__ void add_block(float (&dq)[8][4], float (&dk)[8][4], float (&dv)[8][4],
                            const std::uint32_t (&ds)[4][4], const Tiles& tiles) const {
    const int channel = part * kPanelChannels;
    begin_products();
    multiply_words(dq, ds, ByColumns<kTileRows>(tiles[2], channel), true);
    multiply<kTileRows / 16>(dk, ByColumns<kTileRows>(shared.pairs[team].ds, 0),
                             ByColumns<kTileRows>(tiles[0], channel), true);
    multiply<kTileRows / 16>(dv, ByColumns<kTileRows>(shared.pairs[team].p, 0),
                             ByColumns<kTileRows>(tiles[1], channel), true);
    commit_products();
    wait_products<0>();
    settle(dq);
    settle(dk);
    settle(dv);
  }

  // This group's channels of a result, where the copy engine may not.
  __device__ void store(const unsigned char* tile, const Rows& to, const TilePlace& at, int head,
                        int dim) const {
    const int channel = part * kPanelChannels;
    store_some_rows<kPanelChannels>(tile + part * kPanelBytes, at.rows(to, head) + channel,
                                    to.token, at.count, dim - channel);
  }
};

}  // namespace lln::cuda::sm90
