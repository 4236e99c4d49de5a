// The second backward pass of LLN+Diag on Hopper: dq, dk and dv of the 64 tokens of a tile, whose
// blocks of Diag are closed in themselves, from q, g, k and v of these tokens and from C, dC and t
// of their head (rows_backward.cuh and keys_backward.cuh have the formulas of LLN). With S = q k^T,
// D = g v^T and, of each row, delta = P . D:
//   dS = w2 P (D - delta) / sqrt(dim),  dq += dS k,  dk += dS^T q,  dv += (w2 P)^T g.
// A warpgroup owns 64 channels of the results; where heads have 128, two share a tile and both make
// P and dS. Results take the places of q, k and v.
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

// Fills a team's ring; by one thread.
template <int kDim>
__device__ inline void fill_ring(typename DiagBackwardShape<kDim>::Shared& shared,
                                 const TiledCall& tiled, const TensorMaps& maps, std::uint32_t jobs,
                                 int heads_each, int team) {
  using Shape = DiagBackwardShape<kDim>;
  auto& barriers = shared.rings[team];
  RingPlace<Shape::kSlots> ring;
  int before_mine = team;
  for (BlockTiles<true> tiles(tiled, jobs); tiles.more(); tiles.next()) {
    if (before_mine-- > 0) continue;
    before_mine = Shape::kTeams - 1;
    const TilePlace& at = tiles.place();
    for (int member = 0; member < heads_each; ++member, ring.advance()) {
      Barrier& full = barriers.full[ring.slot];
      auto& to = shared.tiles[team][ring.slot];
      const int head = at.head_k * heads_each + member;
      wait(barriers.empty[ring.slot], ring.parity ^ 1);
      arrive_expecting(full, 4 * Shape::kTileBytes);
      load_tile<kDim>(to[0], maps.q, at, head, full);
      load_tile<kDim>(to[2], maps.k, at, at.head_k, full);
      load_tile<kDim>(to[1], maps.g, at, head, full);
      load_tile<kDim>(to[3], maps.v, at, at.head_k, full);
    }
  }
}

// Sends a team's results; by one thread.
template <int kDim>
__device__ inline void empty_ring(typename DiagBackwardShape<kDim>::Shared& shared,
                                  const TiledCall& tiled, const TensorMaps& maps,
                                  std::uint32_t jobs, int heads_each, int team) {
  using Shape = DiagBackwardShape<kDim>;
  RingPlace<Shape::kSlots> ring;
  int before_mine = team;
  for (BlockTiles<true> tiles(tiled, jobs); tiles.more(); tiles.next()) {
    if (before_mine-- > 0) continue;
    before_mine = Shape::kTeams - 1;
    const TilePlace& at = tiles.place();
    const bool whole = whole_rows(at, tiled.call.sequences.tokens);
    for (int member = 0; member < heads_each; ++member, ring.advance()) {
      const auto& from = shared.tiles[team][ring.slot];
      const int head = at.head_k * heads_each + member;
      wait(shared.done[team][ring.slot], ring.parity);
      if (whole) {
#pragma unroll
        for (int part = 0; part < Shape::kParts; ++part) {
          const int bytes = part * kPanelBytes, channel = part * kPanelChannels;
          store_box(maps.dq, from[0] + bytes, channel, at.token, head, at.batch);
          if (member + 1 < heads_each) continue;
          store_box(maps.dk, from[2] + bytes, channel, at.token, at.head_k, at.batch);
          store_box(maps.dv, from[3] + bytes, channel, at.token, at.head_k, at.batch);
        }
        stores_commit();
        stores_wait_read<0>();
      }
      arrive(shared.rings[team].empty[ring.slot]);
    }
  }
}

// kGrouped: several query heads for each key head.
template <int kDim, bool kGrouped>
__global__ void __launch_bounds__(DiagBackwardShape<kDim>::kThreads, 1)
    diag_backward(const __grid_constant__ TiledCall tiled, const __grid_constant__ TensorMaps maps,
                  std::uint32_t jobs) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = DiagBackwardShape<kDim>;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Shape::Shared*>(memory);
  const DeviceCall& call = tiled.call;
  const int heads_each = kGrouped ? static_cast<int>(static_cast<unsigned>(call.heads) /
                                                     static_cast<unsigned>(call.heads_k))
                                  : 1;
  if (threadIdx.x == 0) {
    for (int team = 0; team < Shape::kTeams; ++team) {
      for (int slot = 0; slot < Shape::kSlots; ++slot) {
        barrier_init(shared.done[team][slot], Shape::kTeamThreads / 32);
      }
      shared.rings[team].init(1);
    }
  }
  __syncthreads();
  if (threadIdx.x >= Shape::kConsumers) {
    give_registers<Shape::kCopyingRegisters>();
    if ((threadIdx.x & 31) != 0) return;
    const int warp = static_cast<int>(threadIdx.x - Shape::kConsumers) / 32;
    if (warp < Shape::kTeams) {
      fill_ring<kDim>(shared, tiled, maps, jobs, heads_each, warp);
    } else if (warp < 2 * Shape::kTeams) {
      empty_ring<kDim>(shared, tiled, maps, jobs, heads_each, warp - Shape::kTeams);
    }
    return;
  }

  take_registers<kConsumerRegisters<Shape::kGroups, Shape::kCopyingRegisters>>();
  BlockTiles<true> places(tiled, jobs);
  wait_for_previous();
  let_next_start();
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const float diag_scale = kLog2E * rsqrtf(static_cast<float>(dim));
  DiagBackwardGroup<kDim> own(shared);
  const int part = own.part, first = own.first, team = own.team;
  const int row_of_lane = first + (static_cast<int>(threadIdx.x) & 31) / 4;
  RingPlace<Shape::kSlots> ring;
  std::int64_t s = -1;  // whose matrices are in shared memory
  int head_k = -1;
  int before_mine = team;  // tiles of the other team
  for (; places.more(); places.next()) {
    const TilePlace& at = places.place();
    if (at.s != s || at.head_k != head_k) {
      s = at.s;
      head_k = at.head_k;
      own.beta = scale_at(call.beta, s, head_k);
      meet(kAllMeet, Shape::kConsumers);
      const int thread = static_cast<int>(threadIdx.x);
      own.taken_out = fill_exponents<Bf16, kDim>(shared.exponents, tiled.state.c_at(s, head_k), dim,
                                                 thread, Shape::kConsumers, kAllMeet);
      fill_panels<kDim, Shape::kConsumers>(shared.operand, tiled.state.values_at(s, head_k),
                                           tiled.state.row, dim, dim_v, thread,
                                           [](int) { return 1.0F; });
      own.folded = fill_gradients<kDim, Shape::kConsumers>(shared.sums, shared.vectors, tiled, at);
    }
    if (before_mine-- > 0) continue;
    before_mine = Shape::kTeams - 1;
    const bool whole = whole_rows(at, call.sequences.tokens);
    const std::uint64_t bits = places.valid();
    std::uint64_t seen[2];
    seen_in_block(seen, bits, static_cast<int>(call.diag_block), first, at.count);
    float dk[8][4], dv[8][4];
    for (int member = 0; member < heads_each; ++member, ring.advance()) {
      const int head = head_k * heads_each + member;
      const bool last = !kGrouped || member + 1 == heads_each;
      own.alpha = scale_at(call.alpha, s, head);
      float lln[2], diag[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = at.row + min(row_of_lane + 8 * half, at.count - 1);
        lln[half] = row_factor(call.lln_weight, places.sequence(), head)(row);
        diag[half] = row_factor(call.diag_weight, places.sequence(), head)(row);
      }
      auto& tiles = shared.tiles[team][ring.slot];
      wait(shared.rings[team].full[ring.slot], ring.parity);
      own.clear(tiles, bits, at.count);
      float scores[8][4], dots[8][4], dq[8][4];
      begin_products();
      multiply<kDim / 16>(scores, ByRows<kTileRows>(tiles[0], 0), ByRows<kTileRows>(tiles[2], 0),
                          false);
      multiply<kDim / 16>(dots, ByRows<kTileRows>(tiles[1], 0), ByRows<kTileRows>(tiles[3], 0),
                          false);
      own.start_dw(dq, tiles[1]);
      std::uint32_t e[4][4];
      read_fragments(e, tiles[0] + part * kPanelBytes, first);
      exponentials(e, own.alpha * kLog2E);
      wait_products<0>();
      settle(scores);
      settle(dots);
      settle(dq);
      own.row_gradients(dq, e, at.rows(call.q, head), call.q.token, at.count, dim, lln);
      mask_pairs(scores, dots, seen);
      std::uint32_t kn[kDim / 16][4], p[4][4], ds[4][4];
      if constexpr (!kGrouped) {
        read_fragments(kn, tiles[2], first);
        key_weights(kn, shared.vectors.added, own.beta * kLog2E, own.folded);
        own.start_keys(dk, dv, kn, tiles[3], false);
        settle(scores);  // their weights are made while the products run
      } else if (member == 0) {
#pragma unroll
        for (int i = 0; i < 32; ++i) dk[i / 4][i % 4] = dv[i / 4][i % 4] = 0;
      }
      block_gradients(p, ds, scores, dots, diag_scale, diag);
      own.put_pairs(p, ds);
      show_products();
      if constexpr (!kGrouped) {
        wait_products<0>();
        settle(dk);
        settle(dv);
        own.key_gradients(dk, kn);
      }
      own.meet_team();  // the pairs are there
      own.add_block(dq, dk, dv, ds, tiles);
      if constexpr (kGrouped) {
        if (last) {
          read_fragments(kn, tiles[2], first);
          key_weights(kn, shared.vectors.added, own.beta * kLog2E, own.folded);
          own.start_keys(scores, dv, kn, tiles[3], true);
          wait_products<0>();
          settle(scores);
          settle(dv);
          own.key_gradients(scores, kn);
#pragma unroll
          for (int i = 0; i < 32; ++i) dk[i / 4][i % 4] += scores[i / 4][i % 4];
        }
      }
      own.meet_team();  // all tiles have been read
      write_results(tiles[0] + part * kPanelBytes, first, dq);
      if (last) {
        const bool valid[2] = {((bits >> row_of_lane) & 1) != 0,
                               ((bits >> row_of_lane >> 8) & 1) != 0};
        zero_rows(dk, valid);
        zero_rows(dv, valid);
        write_results(tiles[2] + part * kPanelBytes, first, dk);
        write_results(tiles[3] + part * kPanelBytes, first, dv);
      }
      show_products();
      if (!whole) {
        own.meet_team();
        own.store(tiles[0], call.dq, at, head, dim);
        if (last) {
          own.store(tiles[2], call.dk, at, head_k, dim);
          own.store(tiles[3], call.dv, at, head_k, dim_v);
        }
      }
      __syncwarp();
      if ((threadIdx.x & 31) == 0) arrive(shared.done[team][ring.slot]);
    }
  }
#endif
}

}  // namespace lln::cuda::sm90
