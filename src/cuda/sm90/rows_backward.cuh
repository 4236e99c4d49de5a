// The backward pass over rows of LLN on Hopper: dq, and for each piece of a sequence dC = W^T g and
// t = W^T delta (tiled_rows_backward.cuh). A warpgroup owns 64 channels of 64 rows: it computes
// dW = g C^T for them while it takes the exponentials of q, then dq, which takes q's place, and
// e / sum, the left operand of the sums over rows, whose products run on while the next tile is
// begun. Where heads have 128 channels two warpgroups share a tile and exchange one pair of numbers
// a row.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sm90/tile_stream.cuh"
#include "cuda/tiled_rows.cuh"

namespace lln::cuda::sm90 {

template <int kDim>
struct RowsBackwardShape {
  static constexpr int kParts = kDim / kPanelChannels;  // warpgroups that share a tile
  static constexpr int kTeams = kDim == 64 ? 3 : 1;     // that take tiles in turn
  static constexpr int kGroups = kParts * kTeams;
  static constexpr int kConsumers = 128 * kGroups, kThreads = kConsumers + kProducerThreads;
  static constexpr int kTileBytes = kTileRows * kDim * 2;
  static constexpr int kSlots = kDim == 64 ? 9 : 5;
  static_assert(kSlots % kTeams == 0);  // RingPlace
  // A warpgroup alone would have to wait for its own products before it writes the next operand.
  static constexpr int kOperands = kParts == 1 ? 2 : 1;

  struct RowSums {
    float mass, dot;
  };
  struct alignas(1024) Operand {
    unsigned char e[kPanelBytes];         // e / sum of 64 rows x 64 channels
    unsigned char delta[kTileRows * 16];  // two columns of delta, upper and lower half (Narrow)
  };
  // Sums of the teams but the first, on their way to it: a number of each thread behind each other.
  using TeamSums = float[kTeams > 1 ? kTeams - 1 : 1][kTeams > 1 ? kDim / 2 + 2 : 1][128];
  struct alignas(1024) Shared {
    unsigned char tiles[kSlots][2][kTileBytes];  // q, g
    unsigned char operand[kDim * kDim * 2];      // C
    union {
      Operand operands[kGroups][kOperands];
      TeamSums sums;  // at the end of a piece
    };
    RowSums exchanged[kParts > 1 ? 3 : 1][kTeams][kParts][kTileRows];
    RowExponents<kDim> exponents;
    Barrier sums_written;  // by the teams but the first
    RingBarriers<kSlots> ring;
  };
};

template <int kDim>
__device__ inline void init_barriers(typename RowsBackwardShape<kDim>::Shared& shared) {
  using Shape = RowsBackwardShape<kDim>;
  if constexpr (Shape::kTeams > 1) barrier_init(shared.sums_written, 128 * (Shape::kTeams - 1));
  shared.ring.init(Shape::kParts);
}

// Named barriers.
inline constexpr int kAllMeet = 1;
inline constexpr int kGroupMeets = 2;  // + group
inline constexpr int kTeamMeets = 6;   // + team
inline constexpr int kPairMeets = 10;  // + warp of the group: the warps that share rows

// One tile of rows for one warpgroup.
template <int kDim, class Shape = RowsBackwardShape<kDim>>
struct RowsBackwardGroup {
  typename Shape::Shared& shared;
  int part, team, first;  // the 16 rows of this warp
  float alpha = 0, taken_out = 0;

  __device__ RowsBackwardGroup(typename Shape::Shared& memory)
      : shared(memory),
        part(static_cast<int>(threadIdx.x) / 128 % Shape::kParts),
        team(static_cast<int>(threadIdx.x) / 128 / Shape::kParts),
        first(static_cast<int>(threadIdx.x) % 128 / 32 * 16) {}

  // Before the rows of a piece: its alpha, and C and c of its keys in shared memory. By all groups,
  // of which none has a product with the operand before under way.
  __device__ void begin(const TiledCall& tiled, const RowPiece& piece) {
    const int dim = static_cast<int>(tiled.call.dim), dim_v = static_cast<int>(tiled.call.dim_v);
    alpha = scale_at(tiled.call.alpha, piece.s, piece.head);
    const PanelFill<kDim, Shape::kConsumers> values(tiled.state.values_at(piece.s, piece.head_k),
                                                    tiled.state.row, dim, dim_v);
    const ChannelNumbers<kDim> c(tiled.state.c_at(piece.s, piece.head_k), dim);
    meet(kAllMeet, Shape::kConsumers);
    taken_out =
        fill_exponents<Bf16, kDim>(shared.exponents, c, tiled.call.channels,
                                   static_cast<int>(threadIdx.x), Shape::kConsumers, kAllMeet);
    values.write(shared.operand, [](int) { return 1.0F; });
    show_products();
    meet(kAllMeet, Shape::kConsumers);
  }

  // Starts dW of this group's channels: g C^T. C is rounded without w, so that channels with the
  // same values have the same dW, and dq is 0 where it should be.
  __device__ void start_dw(float (&dw)[8][4], const unsigned char* g_tile) const {
    begin_products();
    multiply<kDim / 16>(dw, ByRows<kTileRows>(g_tile, 0),
                        ByRows<kDim>(shared.operand, part * kPanelChannels), false);
    commit_products();
  }

  // Sums of rows g and g + 8 over this group's channels become those over all channels.
  __device__ void exchange(float (&mass)[2], float (&dot)[2], int buffer, int barrier,
                           int threads) const {
    if constexpr (Shape::kParts > 1) {
      const int lane = threadIdx.x & 31, row = first + (lane >> 2);
      auto& all = shared.exchanged[buffer][team];
      if ((lane & 3) == 0) {
        all[part][row] = {mass[0], dot[0]};
        all[part][row + 8] = {mass[1], dot[1]};
      }
      meet(barrier, threads);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const auto &one = all[0][row + 8 * half], &two = all[1][row + 8 * half];
        mass[half] = one.mass + two.mass;
        dot[half] = one.dot + two.dot;
      }
    }
  }

  // dW becomes w dW.
  __device__ void weigh(float (&dw)[8][4]) const {
    const float* const w =
        shared.exponents.w + part * kPanelChannels + 2 * (static_cast<int>(threadIdx.x) & 3);
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 ws = *reinterpret_cast<const float2*>(w + 8 * n);
#pragma unroll
      for (int i = 0; i < 4; ++i) dw[n][i] *= i % 2 == 0 ? ws.x : ws.y;
    }
  }

  // Sums over this group's channels of e w, and of e w dW.
  __device__ void sum_rows(const std::uint32_t (&e)[4][4], const float (&dw)[8][4],
                           float (&mass)[2], float (&dot)[2]) const {
    float sum[4] = {};
    multiply_vector(sum, e, shared.exponents.packed_w + part * 8);
    multiply_vector(sum, e, shared.exponents.packed_rest + part * 8);
    mass[0] = sum[0];
    mass[1] = sum[2];
    dot[0] = dot[1] = 0;
#pragma unroll
    for (int step = 0; step < 4; ++step) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 weight = unpack<Bf16>(e[step][i]);
        const float* const x = dw[2 * step + (i >> 1)] + 2 * (i & 1);
        dot[i & 1] = fmaf(weight.x, x[0], fmaf(weight.y, x[1], dot[i & 1]));
      }
    }
    dot[0] = quad_sum(dot[0]);
    dot[1] = quad_sum(dot[1]);
  }

  // dq in place of dw, e / sum in place of e; rows from `count` on are zero in the latter.
  __device__ void finish(std::uint32_t (&e)[4][4], float (&dw)[8][4], const float (&inverse)[2],
                         const float (&delta)[2], int count) const {
    const int lane = threadIdx.x & 31, t = lane & 3;
    const float* const w = shared.exponents.w + part * kPanelChannels + 2 * t;
#pragma unroll
    for (int n = 0; n < 8; ++n) {
      const float2 ws = *reinterpret_cast<const float2*>(w + 8 * n);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        std::uint32_t& words = e[n / 2][2 * (n % 2) + half];
        const float2 weight = unpack<Bf16>(words);
        const float2 share = {weight.x * inverse[half], weight.y * inverse[half]};
        float* const x = dw[n] + 2 * half;
        x[0] = alpha * share.x * fmaf(-ws.x, delta[half], x[0]);
        x[1] = alpha * share.y * fmaf(-ws.y, delta[half], x[1]);
        words = pack<Bf16>(share.x, share.y);
      }
    }
    if (count < kTileRows) {
      const int row = first + (lane >> 2);
#pragma unroll
      for (int step = 0; step < 4; ++step) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          if (row + 8 * (i & 1) >= count) e[step][i] = 0;
        }
      }
    }
  }

  // e / sum and delta as operands of the sums over rows.
  __device__ void write_operand(typename Shape::Operand& to, const std::uint32_t (&e)[4][4],
                                const float (&delta)[2], int count) const {
    const int lane = threadIdx.x & 31, row = first + (lane & 15);
    const std::uint32_t base = shared_address(to.e);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      store_matrices(base + panel_offset<kTileRows>(row, 2 * step + (lane >> 4)), e[step][0],
                     e[step][1], e[step][2], e[step][3]);
    }
    if ((lane & 3) == 0) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int own = first + (lane >> 2) + 8 * half;
        const float x = own < count ? delta[half] : 0;
        const Bf16 upper = __float2bfloat16(x);
        auto* const columns = reinterpret_cast<Bf16*>(to.delta + own / 8 * 128) + own % 8;
        columns[0] = upper;
        columns[8] = __float2bfloat16(x - __bfloat162float(upper));
      }
    }
  }

  // Starts dC += (e / sum)^T g and t += (e / sum)^T delta.
  __device__ void start_sums(float (&dc)[kDim / 8][4], float (&t)[4],
                             const typename Shape::Operand& from,
                             const unsigned char* g_tile) const {
    const ByColumns<kTileRows> e(from.e, 0);
    begin_products();
    multiply<kTileRows / 16>(dc, e, ByColumns<kTileRows>(g_tile, 0), true);
    multiply<kTileRows / 16>(t, e, Narrow(from.delta), true);
    commit_products();
  }
};

// The sums of all teams in those of the first one; the others need not wait for it. `parity` of the
// pieces that were summed before.
template <int kDim>
__device__ inline void add_teams(float (&dc)[kDim / 8][4], float (&t)[4],
                                 typename RowsBackwardShape<kDim>::Shared& shared,
                                 std::uint32_t parity) {
  using Shape = RowsBackwardShape<kDim>;
  if constexpr (Shape::kTeams > 1) {
    const int team = static_cast<int>(threadIdx.x) / 128, thread = threadIdx.x & 127;
    meet(kAllMeet, Shape::kConsumers);  // all products of the piece have ended
    if (team > 0) {
      auto& own = shared.sums[team - 1];
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) own[i][thread] = dc[i / 4][i % 4];
      own[kDim / 2][thread] = t[0] + t[1];
      own[kDim / 2 + 1][thread] = t[2] + t[3];
      arrive(shared.sums_written);
      return;
    }
    wait(shared.sums_written, parity);
    for (int other = 0; other < Shape::kTeams - 1; ++other) {
      const auto& theirs = shared.sums[other];
#pragma unroll
      for (int i = 0; i < kDim / 2; ++i) dc[i / 4][i % 4] += theirs[i][thread];
      t[0] += theirs[kDim / 2][thread];
      t[2] += theirs[kDim / 2 + 1][thread];
    }
  }
}

// dC and t of a piece, times w.
template <int kDim>
__device__ inline void write_row_sums(const TiledCall& tiled, const float (&dc)[kDim / 8][4],
                                      const float (&t)[4], const float* w, std::int64_t slot) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int dim = static_cast<int>(tiled.call.dim), dim_v = static_cast<int>(tiled.call.dim_v);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int channel = 16 * warp + (lane >> 2) + 8 * half;
    if (channel >= dim) continue;
    if ((lane & 3) == 0) {
      tiled.rows.s[slot * dim + channel] = (t[2 * half] + t[2 * half + 1]) * w[channel];
    }
    float* const to = tiled.rows.values + (slot * dim + channel) * dim_v;
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
      const int column = 8 * n + 2 * (lane & 3);
      if (column < dim_v) {
        *reinterpret_cast<float2*>(to + column) = {dc[n][2 * half] * w[channel],
                                                   dc[n][2 * half + 1] * w[channel]};
      }
    }
  }
}

// How often each of kTeams that take tiles in turn has one, or a blank at the end.
template <int kTeams>
__device__ inline int rounds(int rows) {
  return (rows + kTeams * kTileRows - 1) / (kTeams * kTileRows);
}

__device__ inline TilePlace first_tile(const RowPiece& piece) {
  return {piece.s,
          static_cast<int>(piece.head),
          static_cast<int>(piece.head_k),
          static_cast<int>(piece.sequence.batch),
          static_cast<int>(piece.sequence.q_begin + piece.begin),
          0,
          piece.count};
}

// The thread that keeps the ring filled with q and g of the block's items.
template <int kDim>
__device__ inline void fill_ring(typename RowsBackwardShape<kDim>::Shared& shared,
                                 const DeviceCall& call, const TensorMaps& maps,
                                 std::uint32_t items) {
  using Shape = RowsBackwardShape<kDim>;
  wait_for_previous();  // may be that of another call
  RingPlace<Shape::kSlots> ring;
  for (std::uint32_t item = blockIdx.x; item < items; item += gridDim.x) {
    const RowPiece piece = find_rows(call, item);
    if (piece.s < 0) continue;
    TilePlace at = first_tile(piece);
    const int positions = rounds<Shape::kTeams>(piece.count) * Shape::kTeams;
    for (int i = 0; i < positions; ++i, ring.advance()) {
      Barrier& full = shared.ring.full[ring.slot];
      wait(shared.ring.empty[ring.slot], ring.parity ^ 1);
      if (at.row >= piece.count) {
        arrive(full);
        continue;
      }
      arrive_expecting(full, 2 * Shape::kTileBytes);
      load_tile<kDim>(shared.tiles[ring.slot][1], maps.g, at, at.head, full);
      load_tile<kDim>(shared.tiles[ring.slot][0], maps.q, at, at.head, full);
      at.row += kTileRows;
      at.token += kTileRows;
    }
  }
}

// One item is a row job and query head, as find_rows() numbers them.
template <int kDim>
__global__ void __launch_bounds__(RowsBackwardShape<kDim>::kThreads, 1)
    rows_backward(const __grid_constant__ TiledCall tiled, const __grid_constant__ TensorMaps maps,
                  std::uint32_t items) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = RowsBackwardShape<kDim>;
  LLN_DYNAMIC_SHARED(memory);
  auto& shared = *reinterpret_cast<typename Shape::Shared*>(memory);
  const DeviceCall& call = tiled.call;
  if (threadIdx.x == 0) init_barriers<kDim>(shared);
  __syncthreads();
  if (threadIdx.x >= Shape::kConsumers) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x > Shape::kConsumers) return;
    fill_ring<kDim>(shared, call, maps, items);
    return;
  }

  take_registers<kConsumerRegisters<Shape::kGroups>>();
  wait_for_previous();
  let_next_start();
  const int dim = static_cast<int>(call.dim);
  const int group = static_cast<int>(threadIdx.x) / 128;
  const bool elected = (threadIdx.x & 127) == 0;
  RowsBackwardGroup<kDim> own(shared);
  const int part = own.part, first = own.first;
  RingPlace<Shape::kSlots, Shape::kTeams> ring{own.team};
  std::uint32_t summed = 0;  // parity of the pieces
  for (std::uint32_t item = blockIdx.x; item < items; item += gridDim.x) {
    const RowPiece piece = find_rows(call, item);
    if (piece.s < 0) continue;
    own.begin(tiled, piece);

    float dc[kDim / 8][4] = {};
    float t[4] = {};
    TilePlace at = first_tile(piece);
    at.row += own.team * kTileRows;
    at.token += own.team * kTileRows;
    int turn = 0;
    int leaving = -1;  // the slot that the products and copies of the tile before still read
    const int own_rounds = rounds<Shape::kTeams>(piece.count);
    for (int round = 0; round < own_rounds; ++round, ring.advance(),
             at.row += Shape::kTeams * kTileRows, at.token += Shape::kTeams * kTileRows) {
      wait(shared.ring.full[ring.slot], ring.parity);
      if (at.row >= piece.count) {
        meet(kGroupMeets + group, 128);  // all have seen the slot (keys.cuh)
        if (elected) arrive(shared.ring.empty[ring.slot]);
        continue;
      }
      at.count = min(kTileRows, piece.count - at.row);
      auto& tiles = shared.tiles[ring.slot];
      unsigned char* const q_block = tiles[0] + part * kPanelBytes;
      if (at.count < kTileRows) {
        clear_rows<kDim, 128 * Shape::kParts>(tiles[1], ~std::uint64_t{0} >> (kTileRows - at.count),
                                              kTeamMeets + own.team);
      }
      float dw[8][4];
      own.start_dw(dw, tiles[1]);
      std::uint32_t e[4][4];
      read_fragments(e, q_block, first);
      exponentials(e, own.alpha * kLog2E);
      wait_products<0>();  // also those of the tile before
      settle(dw);
      own.weigh(dw);
      float mass[2], dot[2];
      own.sum_rows(e, dw, mass, dot);
      own.exchange(mass, dot, turn, kTeamMeets + own.team, 128 * Shape::kParts);
      const float sum[4] = {mass[0], 0, mass[1], 0};
      if (!trusted(sum, shared.exponents)) {
        careful_tile<kDim>(tiles[0], first, part, part + 1, at.rows(call.q, at.head), call.q.token,
                           at.count, dim, shared.exponents, own.alpha * kLog2E, own.taken_out);
        read_fragments(e, q_block, first);
        own.sum_rows(e, dw, mass, dot);
        own.exchange(mass, dot, 2, kPairMeets + first / 16, 64);
      }
      const float inverse[2] = {inverse_of(mass[0]), inverse_of(mass[1])};
      const float delta[2] = {dot[0] * inverse[0], dot[1] * inverse[1]};
      own.finish(e, dw, inverse, delta, at.count);
      auto& operand = shared.operands[group][Shape::kOperands > 1 ? turn : 0];
      write_results(q_block, first, dw);
      own.write_operand(operand, e, delta, at.count);
      show_products();
      meet(kGroupMeets + group, 128);
      if (elected) {
        if (leaving >= 0) {
          stores_wait_read<0>();
          arrive(shared.ring.empty[leaving]);
        }
        if (whole_rows(at, call.sequences.tokens)) {
          store_box(maps.dq, q_block, part * kPanelChannels, at.token, at.head, at.batch);
          stores_commit();
        }
      }
      if (!whole_rows(at, call.sequences.tokens)) {
        store_some_rows<kPanelChannels>(q_block, at.rows(call.dq, at.head) + part * kPanelChannels,
                                        call.dq.token, at.count, dim - part * kPanelChannels);
      }
      leaving = ring.slot;
      own.start_sums(dc, t, operand, tiles[1]);
      turn ^= 1;
    }
    wait_products<0>();
    settle(dc);
    settle(t);
    meet(kGroupMeets + group, 128);
    if (elected && leaving >= 0) {
      stores_wait_read<0>();
      arrive(shared.ring.empty[leaving]);
    }
    add_teams<kDim>(dc, t, shared, summed);
    summed ^= 1;
    if (own.team == 0) write_row_sums<kDim>(tiled, dc, t, shared.exponents.w, item);
  }
#endif
}

}  // namespace lln::cuda::sm90
