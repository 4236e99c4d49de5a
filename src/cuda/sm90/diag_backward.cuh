// The second backward pass of LLN+Diag on Hopper: dq, dk and dv of the 64 tokens of a tile, whose
// blocks of Diag are closed in themselves, from q, g, k and v of these tokens and from C, dC and t
// of their head. A warpgroup owns 64 channels of the results; where heads have 128, two share a
// tile and both make P and dS. Results take the places of q, k and v.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sm90/diag_backward_tile.cuh"

namespace lln::cuda::sm90 {

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
  LLN_DYNAMIC_SHARED(memory);
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
  const float diag_scale = kLog2E * rsqrtf(static_cast<float>(call.channels));
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
      const PanelFill<kDim, Shape::kConsumers> values(tiled.state.values_at(s, head_k),
                                                      tiled.state.row, dim, dim_v);
      const ChannelNumbers<kDim> c(tiled.state.c_at(s, head_k), dim);
      meet(kAllMeet, Shape::kConsumers);
      own.taken_out =
          fill_exponents<Bf16, kDim>(shared.exponents, c, call.channels,
                                     static_cast<int>(threadIdx.x), Shape::kConsumers, kAllMeet);
      values.write(shared.operand, [](int) { return 1.0F; });
      own.folded =
          fill_gradients<kDim, Shape::kConsumers>(shared.sums, shared.vectors, tiled, s, head_k);
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
