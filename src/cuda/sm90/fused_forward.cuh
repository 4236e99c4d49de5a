// The forward pass of LLN on Hopper in one launch. A cluster of blocks takes a sequence and key
// head: each block sums its pieces of the keys, the cluster joins them, and each block goes on with
// its rows, while its ring already fills with what comes next. So the stream of bytes never stops
// between the passes, and a short sequence costs one launch. The arithmetic is that of keys.cuh,
// tiled_join.cuh and rows.cuh, to the last bit.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sm90/keys.cuh"
#include "cuda/sm90/rows.cuh"
#include "cuda/tiled_join.cuh"

namespace lln::cuda::sm90 {

template <int kDim>
struct FusedShape {
  using Keys = KeysShape<kDim>;
  static constexpr int kGroups = 3;  // warpgroups that compute
  static constexpr int kConsumers = 128 * kGroups, kThreads = kConsumers + kProducerThreads;
  static constexpr int kTileBytes = kTileRows * kDim * 2;
  static constexpr int kSlots = kDim == 64 ? 18 : 12;
  // RingPlace: rows are taken in turn by all groups, pairs of k and v by teams. Between the passes
  // all groups meet, and what a slot was used for before does not matter.
  static_assert(kSlots % kGroups == 0 && kSlots % (2 * Keys::kTeams) == 0);
  struct alignas(1024) Shared {
    unsigned char tiles[kSlots][kTileBytes];
    RowOperand<kDim> operand;
    typename Keys::TeamSums sums;
    RingBarriers<kSlots> ring;
    Barrier summed, joined;  // by all blocks of the cluster
  };
};

// Sequence s and key head `head_k` in the hands of the blocks of one cluster.
struct FusedItem {
  const TiledCall& tiled;
  std::uint32_t item, rank, blocks;  // of the cluster

  __device__ std::uint32_t heads_k() const {
    return static_cast<std::uint32_t>(tiled.call.heads_k);
  }
  __device__ std::int64_t s() const { return item / heads_k(); }
  __device__ int head_k() const { return static_cast<int>(item % heads_k()); }

  // This block takes pieces rank, rank + blocks, ... of the key pieces.
  __device__ KeyPiecePlace piece(std::uint32_t index) const {
    const std::uint32_t job = static_cast<std::uint32_t>(s()) * tiled.key_pieces + index;
    return key_piece(tiled, job * heads_k() + static_cast<std::uint32_t>(head_k()));
  }
};

// A block's share of the row tiles of an item: those of a query head behind each other, then the
// query heads that share the key head.
class FusedRows {
 public:
  __device__ explicit FusedRows(const FusedItem& item)
      : sequence_(sequence_at(item.tiled.call.sequences, item.s())),
        s_(item.s()),
        head_k_(item.head_k()),
        group_(static_cast<int>(item.tiled.call.heads / item.tiled.call.heads_k)),
        each_(static_cast<int>((sequence_.q_tokens + kTileRows - 1) / kTileRows)) {
    const std::uint64_t tiles = std::uint64_t{static_cast<std::uint32_t>(each_)} * group_;
    first_ = static_cast<int>(tiles * item.rank / item.blocks);
    count_ = static_cast<int>(tiles * (item.rank + 1) / item.blocks) - first_;
  }
  __device__ int count() const { return count_; }
  __device__ TilePlace place(int i) const {
    const int tile = first_ + i, row = tile % each_ * kTileRows;
    return {s_,
            head_k_ * group_ + tile / each_,
            head_k_,
            static_cast<int>(sequence_.batch),
            static_cast<int>(sequence_.q_begin) + row,
            row,
            min(kTileRows, static_cast<int>(sequence_.q_tokens) - row)};
  }

 private:
  DeviceSequence sequence_;
  std::int64_t s_;
  int head_k_, group_, each_, first_, count_;
};

// By one thread: keeps the ring filled.
template <int kDim>
__device__ inline void fill_ring(typename FusedShape<kDim>::Shared& shared, const TensorMaps& maps,
                                 FusedItem item, std::uint32_t items, std::uint32_t clusters) {
  using Shape = FusedShape<kDim>;
  RingPlace<Shape::kSlots> ring;
  const auto load = [&](const CUtensorMap& map, const TilePlace& at, int head) {
    Barrier& full = shared.ring.full[ring.slot];
    wait(shared.ring.empty[ring.slot], ring.parity ^ 1);
    arrive_expecting(full, Shape::kTileBytes);
    load_tile<kDim>(shared.tiles[ring.slot], map, at, head, full);
    ring.advance();
  };
  for (; item.item < items; item.item += clusters) {
    for (std::uint32_t i = item.rank; i < item.tiled.key_pieces; i += item.blocks) {
      KeyPiecePlace piece = item.piece(i);
      TilePlace& at = piece.tile;
      for (; at.s >= 0 && at.row < piece.end; at.row += kTileRows, at.token += kTileRows) {
        load(maps.k, at, at.head);
        load(maps.v, at, at.head);
      }
    }
    const FusedRows rows(item);
    for (int i = 0; i < rows.count(); ++i) {
      const TilePlace at = rows.place(i);
      load(maps.q, at, at.head);
    }
  }
}

// The sums of one piece. `ring` is where the tiles of the piece begin, and where they end.
template <int kDim>
__device__ inline void sum_piece(typename FusedShape<kDim>::Shared& shared, const TiledCall& tiled,
                                 const KeyPiecePlace& piece,
                                 RingPlace<FusedShape<kDim>::kSlots>& ring, bool whole) {
  using Keys = KeysShape<kDim>;
  constexpr int kSlots = FusedShape<kDim>::kSlots, kStep = 2 * Keys::kTeams;
  const int group = static_cast<int>(threadIdx.x) / 128;
  const int part = group % Keys::kParts, team = group / Keys::kParts;
  const auto tiles = static_cast<int>((piece.end - piece.begin + kTileRows - 1) / kTileRows);
  const auto begin = ring;
  ring.skip(2 * tiles % (2 * kSlots));
  if (team >= Keys::kTeams) return;
  const bool elected = (threadIdx.x & 127) == 0;
  const float scale = scale_at(tiled.call.beta, piece.tile.s, piece.tile.head) * kLog2E;
  auto own = begin;
  own.skip(2 * team);
  RingPlace<kSlots, kStep> k{own.slot, own.parity};
  own.skip(1);
  RingPlace<kSlots, kStep> v{own.slot, own.parity};
  PlainSums<kDim> sums;
  int leaving_k = -1, leaving_v = -1;  // the slots that products under way still read
  const auto release = [&] {
    wait_products<0>();
    settle(sums.values);
    if (elected && leaving_k >= 0) {
      arrive(shared.ring.empty[leaving_k]);
      arrive(shared.ring.empty[leaving_v]);
    }
  };
  const auto add = [&](std::uint32_t(&a)[4][4], int tile) {
    wait(shared.ring.full[k.slot], k.parity);
    wait(shared.ring.full[v.slot], v.parity);
    add_tile(
        sums, a, shared.tiles[k.slot], shared.tiles[v.slot],
        valid_keys(tiled.call.sequences, piece.sequence, piece.begin + tile * kTileRows, piece.end),
        scale, part, team, release);
    leaving_k = k.slot;
    leaving_v = v.slot;
    k.advance();
    v.advance();
  };
  std::uint32_t a[2][4][4];
  for (int tile = team; tile < tiles; tile += 2 * Keys::kTeams) {
    add(a[0], tile);
    if (tile + Keys::kTeams < tiles) add(a[1], tile + Keys::kTeams);
  }
  release();
  add_teams<kDim>(sums, shared.sums);
  if (team == 0) write_piece(tiled, sums, piece, scale, whole);
}

// This block's share of the joining of all pieces of a sequence and key head.
template <int kThreads>
__device__ inline void join_share(const FusedItem& item) {
  const TiledCall& tiled = item.tiled;
  const DeviceCall& call = tiled.call;
  const auto dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const KeyPieces own = key_pieces(tiled, item.s(), sequence_at(call.sequences, item.s()));
  const int chunks = dim_v / 4, step = kThreads * static_cast<int>(item.blocks);
  const std::int64_t head = own.first * call.heads_k + item.head_k();
  for (int i = static_cast<int>(item.rank) * kThreads + static_cast<int>(threadIdx.x);
       i < dim * chunks; i += step) {
    const int channel = i / chunks, column = i % chunks * 4;
    Joined sums;
    const float* values = nullptr;
#pragma unroll 4
    for (int piece = 0; piece < static_cast<int>(own.count); ++piece) {
      const std::int64_t at = (head + piece * call.heads_k) * dim + channel;
      values = tiled.keys.values + at * dim_v + column;
      add_sums<true>(sums, tiled.keys.m[at], tiled.keys.s[at],
                     *reinterpret_cast<const float4*>(values));
    }
    write_joined(tiled, sums, item.s(), item.head_k(), channel, column,
                 own.count == 1 ? values : nullptr);
  }
}

// All that was written before by the threads that compute is there for those of the whole cluster.
template <int kThreads>
__device__ inline void publish(Barrier& barrier, std::uint32_t blocks, std::uint32_t parity) {
  meet(1, kThreads);
  if (threadIdx.x < blocks) arrive_at_block(barrier, threadIdx.x);
  wait_cluster(barrier, parity);
}

// blocks: of a cluster.
template <int kDim>
__global__ void __launch_bounds__(FusedShape<kDim>::kThreads, 1)
    fused_forward(const __grid_constant__ TiledCall tiled, const __grid_constant__ TensorMaps maps,
                  std::uint32_t items, std::uint32_t blocks) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = FusedShape<kDim>;
  constexpr int kParts = KeysShape<kDim>::kParts;
  extern __shared__ __align__(1024) unsigned char memory[];
  auto& shared = *reinterpret_cast<typename Shape::Shared*>(memory);
  if (threadIdx.x == 0) {
    barrier_init(shared.summed, static_cast<int>(blocks));
    barrier_init(shared.joined, static_cast<int>(blocks));
    shared.ring.init(kParts);
  }
  meet_cluster();
  const std::uint32_t clusters = gridDim.x / blocks;
  FusedItem item{tiled, blockIdx.x / blocks, cluster_rank(), blocks};
  if (threadIdx.x >= Shape::kConsumers) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == Shape::kConsumers) fill_ring<kDim>(shared, maps, item, items, clusters);
    __syncwarp();
  } else {
    take_registers<kConsumerRegisters<Shape::kGroups>>();
    const int group = static_cast<int>(threadIdx.x) / 128;
    const bool whole = tiled.key_pieces == 1;
    Departures<kDim, Shape::kSlots, kParts> departures(shared.ring);
    RingPlace<Shape::kSlots> ring;
    std::uint32_t parity = 0;
    for (; item.item < items; item.item += clusters, parity ^= 1) {
      for (std::uint32_t i = item.rank; i < tiled.key_pieces; i += blocks) {
        const KeyPiecePlace piece = item.piece(i);
        if (piece.tile.s >= 0) sum_piece<kDim>(shared, tiled, piece, ring, whole);
      }
      if (!whole) {
        publish<Shape::kConsumers>(shared.summed, blocks, parity);
        join_share<Shape::kConsumers>(item);
        publish<Shape::kConsumers>(shared.joined, blocks, parity);
      }
      const float taken_out =
          shared.operand.template fill<Shape::kConsumers>(tiled, item.s(), item.head_k());
      const FusedRows rows(item);
      auto own = ring;
      own.skip(group);
      RingPlace<Shape::kSlots, Shape::kGroups> place{own.slot, own.parity};
      for (int i = group; i < rows.count(); i += Shape::kGroups, place.advance()) {
        const TilePlace at = rows.place(i);
        wait(shared.ring.full[place.slot], place.parity);
        forward_tile(shared.tiles[place.slot], at, shared.operand,
                     scale_at(tiled.call.alpha, at.s, at.head) * kLog2E, taken_out, tiled.call,
                     maps.o, group, departures);
        departures.leave(place.slot);
      }
      departures.leave_all();
      ring.skip(rows.count() % (2 * Shape::kSlots));
      meet(1, Shape::kConsumers);
    }
    departures.finish();
  }
  meet_cluster();  // no block ends while others may still arrive at its barriers
#endif
}

}  // namespace lln::cuda::sm90
