// The pass over keys on Hopper: for each piece of a sequence and key head the sums that make (c,
// C), as in tiled_keys.cuh. A warpgroup owns 64 channels; the keys become its left operand in
// registers, v is read from shared memory as it came. Warpgroups with the same channels take tiles
// in turn, and their sums are added in order.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sm90/tile_stream.cuh"
#include "cuda/tiled_keys.cuh"

namespace lln::cuda::sm90 {

static_assert(kTileRows == kTileTokens);

template <int kDim>
struct KeysShape {
  static constexpr int kParts = kDim / kPanelChannels;  // warpgroups that share a tile
  static constexpr int kTeams = kDim == 64 ? 3 : 1;     // that take tiles in turn
  static constexpr int kGroups = kParts * kTeams;
  static constexpr int kConsumers = 128 * kGroups, kThreads = kConsumers + kProducerThreads;
  static constexpr int kTileBytes = kTileRows * kDim * 2;
  static constexpr int kSlots = kDim == 64 ? 9 : 5;
  static_assert(kSlots % kTeams == 0);  // RingPlace
  // Sums of the teams but the first, on their way to it: a number of each thread behind each other.
  struct TeamSums {
    float numbers[kTeams > 1 ? kTeams - 1 : 1][kTeams > 1 ? kDim / 2 + 2 : 1][128];
    Barrier written, read;

    // By one thread; RingBarriers::init() must follow.
    __device__ void init() {
      if constexpr (kTeams > 1) {
        barrier_init(written, 128 * (kTeams - 1));
        barrier_init(read, 128);
      }
    }
  };
  struct alignas(1024) Shared {
    unsigned char tiles[kSlots][2][kTileBytes];  // k, v
    TeamSums sums;
    RingBarriers<kSlots> ring;
  };
};

// The key pieces of a block, in the order of their slots.
struct KeyPiecePlace {
  TilePlace tile;                   // the first one
  std::int64_t begin = 0, end = 0;  // in the sequence
  std::int64_t slot = 0;
  DeviceSequence sequence;

  // How often each of kTeams that take its tiles in turn has one, or a blank at the end.
  template <int kTeams>
  __device__ int rounds() const {
    return static_cast<int>((end - begin + kTeams * kTileRows - 1) / (kTeams * kTileRows));
  }
};

__device__ inline KeyPiecePlace key_piece(const TiledCall& tiled, std::uint32_t item) {
  const auto heads = static_cast<std::uint32_t>(tiled.call.heads_k);
  const JobPlace job = find_key_piece(tiled, item / heads);
  KeyPiecePlace piece;
  piece.slot = item;
  if (job.s < 0) return piece;
  piece.sequence = job.sequence;
  const DeviceSequence& seq = piece.sequence;
  const std::int64_t tokens = tiled.call.sequences.k_jobs.piece(seq.key_end - seq.key_first);
  piece.begin = seq.key_first + job.index * tokens;
  piece.end = min(piece.begin + tokens, seq.key_end);
  const auto head = static_cast<int>(item % heads);
  piece.tile = {job.s,
                head,
                head,
                static_cast<int>(seq.batch),
                static_cast<int>(seq.k_begin + piece.begin),
                static_cast<int>(piece.begin),
                kTileRows};
  return piece;
}

// This warp's 16 channels of a piece with the reference exponents that fit them, straight from
// memory. Not inlined: it is for rare pieces, and its registers would be everybody's.
template <int kDim>
__device__ __noinline__ void careful_sums(ChannelSums<kDim>& sums, const DeviceCall& call,
                                          const KeyPiecePlace& piece, float scale) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  const int channel = 16 * (static_cast<int>(threadIdx.x) / 32) + g;
  const Bf16* const k = piece.tile.rows(call.k, piece.tile.head);
  const Bf16* const v = piece.tile.rows(call.v, piece.tile.head);
  const auto count = static_cast<int>(piece.end - piece.begin);
  const auto valid = [&](int key) {
    return key < count && key_valid(call.sequences, piece.sequence, piece.begin + key);
  };
  const auto exponent = [&](int key, int half) {
    if (!valid(key)) return -INFINITY;
    const int l = channel + 8 * half;
    return l < call.dim ? clamp_keep_nan(__bfloat162float(k[key * call.k.token + l]) * scale)
                        : 0.0F;
  };
  for (int half = 0; half < 2; ++half) {
    float top = kNoExponent;
    for (int key = t; key < count; key += 4) top = fmaxf(top, exponent(key, half));
    sums.m[half] = quad_max(top);
  }
  for (int first = 0; first < count; first += 16) {
    std::uint32_t a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int key = first + 8 * (i >> 1) + 2 * t, half = i & 1;
      const float e0 = exp2_fast(exponent(key, half) - sums.m[half]);
      const float e1 = exp2_fast(exponent(key + 1, half) - sums.m[half]);
      sums.s[half] += e0 + e1;
      a[i] = pack<Bf16>(e0, e1);
    }
    const auto value = [&](int key, int column) {
      return valid(key) && column < call.dim_v ? v[key * call.v.token + column]
                                               : __float2bfloat16(0);
    };
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      std::uint32_t b[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const __nv_bfloat162 pair(value(first + 8 * i + 2 * t, 8 * n + g),
                                  value(first + 8 * i + 2 * t + 1, 8 * n + g));
        b[i] = *reinterpret_cast<const std::uint32_t*>(&pair);
      }
      mma<Bf16>(sums.values[n], a[0], a[1], a[2], a[3], b[0], b[1]);
    }
  }
}

// The left operand of 64 tokens for this warp's 16 channels: 2^(beta k), 0 without a bit of
// `valid`.
__device__ inline void key_exponentials(std::uint32_t (&a)[4][4], const unsigned char* k_block,
                                        float scale, std::uint64_t valid) {
  const int lane = threadIdx.x & 31, t = lane & 3;
  const int channel = static_cast<int>(threadIdx.x) % 128 / 32 * 16;
  const std::uint32_t base = shared_address(k_block);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    const int row = 16 * step + (lane >> 4) * 8 + (lane & 7);
    load_transposed(a[step], base + panel_offset<kTileRows>(row, channel / 8 + ((lane >> 3) & 1)));
  }
  exponentials(a, scale);
  if (valid == ~std::uint64_t{0}) return;
#pragma unroll
  for (int step = 0; step < 4; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int token = 16 * step + 8 * (i >> 1) + 2 * t;
      if (((valid >> token) & 1) == 0) a[step][i] &= 0xFFFF0000U;
      if (((valid >> token) & 2) == 0) a[step][i] &= 0x0000FFFFU;
    }
  }
}

// Adds a tile to the sums; the products are under way when it returns.
template <int kDim>
__device__ inline void add_products(PlainSums<kDim>& sums, const std::uint32_t (&a)[4][4],
                                    const unsigned char* v_tile) {
  begin_products();
  multiply_words(sums.values, a, ByColumns<kTileRows>(v_tile, 0), true);
  commit_products();
  const std::uint32_t ones = pack<Bf16>(1, 1);
#pragma unroll
  for (int step = 0; step < 4; ++step) {
    mma<Bf16>(sums.s, a[step][0], a[step][1], a[step][2], a[step][3], ones, ones);
  }
}

// Takes a tile of keys into the sums, in fragments of its own: `release` waits for the products of
// the tile before, which still read theirs. part: which 64 channels are this warpgroup's.
template <int kDim, class Release>
__device__ inline void add_tile(PlainSums<kDim>& sums, std::uint32_t (&a)[4][4],
                                const unsigned char* k_tile, unsigned char* v_tile,
                                std::uint64_t valid, float scale, int part, int team,
                                Release&& release) {
  if (valid != ~std::uint64_t{0}) {
    clear_rows<kDim, 128 * KeysShape<kDim>::kParts>(v_tile, valid, 2 + team);
  }
  key_exponentials(a, k_tile + part * kPanelBytes, scale, valid);
  release();
  add_products(sums, a, v_tile);
}

// The sums of all teams in those of the first one. Neither side waits where it need not: the others
// are in the next piece while the first team adds and writes. `parity` of the pieces that were
// summed before.
template <int kDim>
__device__ inline void add_teams(PlainSums<kDim>& sums, typename KeysShape<kDim>::TeamSums& passed,
                                 std::uint32_t parity) {
  using Shape = KeysShape<kDim>;
  if constexpr (Shape::kTeams > 1) {
    const int team = static_cast<int>(threadIdx.x) / 128, thread = threadIdx.x & 127;
    if (team > 0) {
      wait(passed.read, parity ^ 1);
      auto& own = passed.numbers[team - 1];
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) own[i][thread] = sums.values[i / 4][i % 4];
      own[kDim / 2][thread] = sums.s[0];
      own[kDim / 2 + 1][thread] = sums.s[2];
      arrive(passed.written);
      return;
    }
    wait(passed.written, parity);
    for (int other = 0; other < Shape::kTeams - 1; ++other) {
      const auto& theirs = passed.numbers[other];
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) sums.values[i / 4][i % 4] += theirs[i][thread];
      sums.s[0] += theirs[kDim / 2][thread];
      sums.s[2] += theirs[kDim / 2 + 1][thread];
    }
    arrive(passed.read);
  }
}

// By the first team, which has the sums of a piece: proves or replaces them, and writes them.
template <int kDim>
__device__ inline void write_piece(const TiledCall& tiled, const PlainSums<kDim>& sums,
                                   const KeyPiecePlace& piece, float scale, bool whole) {
  ChannelSums<kDim> result;
  if (meet_all(sums.trusted(), 8, 128 * KeysShape<kDim>::kParts)) {
    sums.take(result);
  } else {
    const KeyPiecePlace again = piece;  // a call by reference would keep this one in memory
    ChannelSums<kDim> careful;
    careful_sums<kDim>(careful, tiled.call, again, scale);
    result = careful;
  }
  write_key_sums(tiled, result, piece.tile.s, piece.tile.head, piece.slot, 0, whole);
}

template <int kDim>
__global__ void __launch_bounds__(KeysShape<kDim>::kThreads, 1)
    key_sums(const __grid_constant__ TiledCall tiled, const __grid_constant__ TensorMaps maps,
             std::uint32_t items, bool whole) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = KeysShape<kDim>;
  LLN_DYNAMIC_SHARED(memory);
  auto& shared = *reinterpret_cast<typename Shape::Shared*>(memory);
  const DeviceCall& call = tiled.call;
  if (threadIdx.x == 0) {
    shared.sums.init();
    shared.ring.init(Shape::kParts);
  }
  __syncthreads();
  wait_for_previous();
  let_next_start();
  if (threadIdx.x >= Shape::kConsumers) {
    RingPlace<Shape::kSlots> ring;
    give_registers<kProducerRegisters>();
    if (threadIdx.x > Shape::kConsumers) return;
    for (std::uint32_t item = blockIdx.x; item < items; item += gridDim.x) {
      KeyPiecePlace piece = key_piece(tiled, item);
      TilePlace& at = piece.tile;
      const int positions = piece.rounds<Shape::kTeams>() * Shape::kTeams;
      for (int i = 0; i < positions; ++i, ring.advance()) {
        Barrier& full = shared.ring.full[ring.slot];
        wait(shared.ring.empty[ring.slot], ring.parity ^ 1);
        if (at.row >= piece.end) {
          arrive(full);
          continue;
        }
        arrive_expecting(full, 2 * Shape::kTileBytes);
        load_tile<kDim>(shared.tiles[ring.slot][0], maps.k, at, at.head, full);
        load_tile<kDim>(shared.tiles[ring.slot][1], maps.v, at, at.head, full);
        at.row += kTileRows;
        at.token += kTileRows;
      }
    }
    return;
  }

  take_registers<kConsumerRegisters<Shape::kGroups>>();
  const int group = static_cast<int>(threadIdx.x) / 128;
  const int part = group % Shape::kParts, team = group / Shape::kParts;
  const bool elected = (threadIdx.x & 127) == 0;
  RingPlace<Shape::kSlots, Shape::kTeams> ring{team};
  std::uint32_t summed = 0;  // parity of the pieces
  for (std::uint32_t item = blockIdx.x; item < items; item += gridDim.x) {
    const KeyPiecePlace piece = key_piece(tiled, item);
    if (piece.tile.s < 0) continue;
    const float scale = scale_at(call.beta, piece.tile.s, piece.tile.head) * kLog2E;
    PlainSums<kDim> sums;
    std::int64_t row = piece.begin + team * kTileRows;
    int leaving = -1;  // the slot that products under way still read
    const auto release = [&] {
      wait_products<0>();
      settle(sums.values);
      if (elected && leaving >= 0) arrive(shared.ring.empty[leaving]);
    };
    const auto add = [&](std::uint32_t(&a)[4][4]) {
      wait(shared.ring.full[ring.slot], ring.parity);
      if (row < piece.end) {
        auto& tiles = shared.tiles[ring.slot];
        add_tile(sums, a, tiles[0], tiles[1],
                 valid_keys(call.sequences, piece.sequence, row, piece.end), scale, part, team,
                 release);
      } else {
        release();
        // Whoever is still before the wait would miss the slot's next two phases: products, which
        // nobody ends before all have begun them, are missing here.
        meet(2 + team, 128 * Shape::kParts);
      }
      leaving = ring.slot;
      ring.advance();
      row += Shape::kTeams * kTileRows;
    };
    std::uint32_t a[2][4][4];
    const int rounds = piece.rounds<Shape::kTeams>();
    for (int round = 0; round < rounds; round += 2) {
      add(a[0]);
      if (round + 1 < rounds) add(a[1]);
    }
    release();
    add_teams<kDim>(sums, shared.sums, summed);
    summed ^= 1;
    if (team == 0) write_piece(tiled, sums, piece, scale, whole);
  }
#endif
}

}  // namespace lln::cuda::sm90
