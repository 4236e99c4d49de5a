// The forward pass of LLN on Hopper in one launch, for short sequences: a block sums all keys of a
// sequence and key head, and goes on with the rows, which are under way to its ring meanwhile. The
// arithmetic is that of keys.cuh and rows.cuh, to the last bit.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sm90/keys.cuh"
#include "cuda/sm90/rows.cuh"

namespace lln::cuda::sm90 {

template <int kDim>
struct ShortShape {
  using Keys = KeysShape<kDim>;
  static constexpr int kGroups = 3;  // warpgroups that compute
  static constexpr int kConsumers = 128 * kGroups, kThreads = kConsumers + kProducerThreads;
  static constexpr int kTileBytes = kTileRows * kDim * 2;
  static constexpr int kSlots = kDim == 64 ? 18 : 12;
  // RingPlace: pairs of k and v are taken in turn by teams, rows by all groups. Between the passes
  // all groups meet, and what a slot was used for before does not matter.
  static_assert(kSlots % kGroups == 0 && kSlots % (2 * Keys::kTeams) == 0);
  struct alignas(1024) Shared {
    unsigned char tiles[kSlots][kTileBytes];
    RowOperand<kDim> operand;
    typename Keys::TeamSums sums;
    RingBarriers<kSlots> ring;
  };
};

// The row tiles of a sequence and key head: those of a query head behind each
// other, then the query heads that share the key head.
class ShortRows {
 public:
  __device__ ShortRows(const DeviceCall& call, const KeyPiecePlace& piece)
      : keys_(piece.tile),
        tokens_(static_cast<int>(piece.sequence.q_tokens)),
        begin_(static_cast<int>(piece.sequence.q_begin)),
        group_(static_cast<int>(call.heads / call.heads_k)),
        each_((tokens_ + kTileRows - 1) / kTileRows) {}
  __device__ int count() const { return group_ * each_; }
  __device__ TilePlace place(int tile) const {
    const int row = tile % each_ * kTileRows;
    return {keys_.s, keys_.head * group_ + tile / each_, keys_.head, keys_.batch, begin_ + row,
            row,     min(kTileRows, tokens_ - row)};
  }

 private:
  TilePlace keys_;
  int tokens_, begin_, group_, each_;
};

// The state of the sequence and key head, from all of its keys.
template <int kDim>
__device__ inline void sum_all_keys(typename ShortShape<kDim>::Shared& shared,
                                    const TiledCall& tiled, const KeyPiecePlace& piece, int tiles) {
  using Keys = KeysShape<kDim>;
  using Place = RingPlace<ShortShape<kDim>::kSlots, 2 * Keys::kTeams>;
  const int group = static_cast<int>(threadIdx.x) / 128;
  const int part = group % Keys::kParts, team = group / Keys::kParts;
  if (team >= Keys::kTeams) return;
  const bool elected = (threadIdx.x & 127) == 0;
  const float scale = scale_at(tiled.call.beta, piece.tile.s, piece.tile.head) * kLog2E;
  Place k = Place::at(2 * team), v = Place::at(2 * team + 1);
  PlainSums<kDim> sums;
  int leaving = -1;  // the slot of k, before that of v, that products under way still read
  const auto release = [&] {
    wait_products<0>();
    settle(sums.values);
    if (elected && leaving >= 0) {
      arrive(shared.ring.empty[leaving]);
      arrive(shared.ring.empty[leaving + 1]);
    }
  };
  const auto add = [&](std::uint32_t(&a)[4][4], int tile) {
    wait(shared.ring.full[k.slot], k.parity);
    wait(shared.ring.full[v.slot], v.parity);
    add_tile(
        sums, a, shared.tiles[k.slot], shared.tiles[v.slot],
        valid_keys(tiled.call.sequences, piece.sequence, piece.begin + tile * kTileRows, piece.end),
        scale, part, team, release);
    leaving = k.slot;
    k.advance();
    v.advance();
  };
  std::uint32_t a[2][4][4];
  for (int tile = team; tile < tiles; tile += 2 * Keys::kTeams) {
    add(a[0], tile);
    if (tile + Keys::kTeams < tiles) add(a[1], tile + Keys::kTeams);
  }
  release();
  add_teams<kDim>(sums, shared.sums, 0);
  if (team == 0) write_piece(tiled, sums, piece, scale, true);
}

// One block per sequence and key head.
template <int kDim>
__global__ void __launch_bounds__(ShortShape<kDim>::kThreads, 1)
    short_forward(const __grid_constant__ TiledCall tiled,
                  const __grid_constant__ TensorMaps maps) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = ShortShape<kDim>;
  constexpr int kParts = KeysShape<kDim>::kParts;
  LLN_DYNAMIC_SHARED(memory);
  auto& shared = *reinterpret_cast<typename Shape::Shared*>(memory);
  if (threadIdx.x == 0) {
    shared.sums.init();
    shared.ring.init(kParts);
  }
  __syncthreads();
  wait_for_previous();
  let_next_start();
  const DeviceCall& call = tiled.call;
  KeyPiecePlace piece = key_piece(tiled, blockIdx.x);
  const ShortRows rows(call, piece);
  const auto key_tiles = static_cast<int>((piece.end - piece.begin + kTileRows - 1) / kTileRows);
  if (threadIdx.x >= Shape::kConsumers) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x > Shape::kConsumers) return;
    RingPlace<Shape::kSlots> ring;
    const auto load = [&](const CUtensorMap& map, const TilePlace& at) {
      Barrier& full = shared.ring.full[ring.slot];
      wait(shared.ring.empty[ring.slot], ring.parity ^ 1);
      arrive_expecting(full, Shape::kTileBytes);
      load_tile<kDim>(shared.tiles[ring.slot], map, at, at.head, full);
      ring.advance();
    };
    for (int i = 0; i < key_tiles; ++i) {
      load(maps.k, piece.tile);
      load(maps.v, piece.tile);
      piece.tile.token += kTileRows;
    }
    for (int i = 0; i < rows.count(); ++i) load(maps.q, rows.place(i));
    return;
  }

  take_registers<kConsumerRegisters<Shape::kGroups>>();
  sum_all_keys<kDim>(shared, tiled, piece, key_tiles);
  // The state is read back from device memory, where it may be wanted anyway.
  meet(1, Shape::kConsumers);  // the first team has written it
  const float taken_out =
      shared.operand.template fill<Shape::kConsumers>(tiled, piece.tile.s, piece.tile.head);
  const int group = static_cast<int>(threadIdx.x) / 128;
  Departures<kDim, Shape::kSlots, kParts> departures(shared.ring);
  auto ring = RingPlace<Shape::kSlots, Shape::kGroups>::at(2 * key_tiles + group);
  for (int i = group; i < rows.count(); i += Shape::kGroups, ring.advance()) {
    const TilePlace at = rows.place(i);
    wait(shared.ring.full[ring.slot], ring.parity);
    forward_tile(shared.tiles[ring.slot], at, shared.operand,
                 scale_at(call.alpha, at.s, at.head) * kLog2E, taken_out, call, maps.o, group,
                 departures);
    departures.leave(ring.slot);
  }
  departures.finish();
#endif
}

}  // namespace lln::cuda::sm90
