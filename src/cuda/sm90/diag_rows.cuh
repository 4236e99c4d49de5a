// The forward pass over rows of LLN+Diag on Hopper: o = w1 W C + w2 P v. As rows.cuh; the keys and
// values of a tile's block of Diag come with its rows, and the product with C runs while the
// weights of the block are made.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sm90/diag_tiles.cuh"

namespace lln::cuda::sm90 {

template <int kDim>
struct DiagRowsShape {
  static constexpr int kGroups = kDim == 64 ? 3 : 2;  // warpgroups that compute
  static constexpr int kConsumers = 128 * kGroups, kThreads = kConsumers + kProducerThreads;
  static constexpr int kTileBytes = kTileRows * kDim * 2;
  static constexpr int kSlots = kDim == 64 ? 9 : 4;
  static_assert(kSlots % kGroups == 0);  // RingPlace
  struct alignas(1024) Shared {
    unsigned char tiles[kSlots][3][kTileBytes];  // q, k, v
    unsigned char operand[kDim * kDim * 2];
    RowExponents<kDim> exponents;
    RingBarriers<kSlots> ring;
  };
};

// Scores become weights up to the rows' masses, as left operands.
__device__ inline void block_weights(std::uint32_t (&p)[4][4],
                                     const float (&scores)[kTileRows / 8][4], float scale) {
  float top[2];
  find_tops(top, scores);
  const float shift[2] = {-top[0] * scale - kHeadroom<Bf16>, -top[1] * scale - kHeadroom<Bf16>};
#pragma unroll
  for (int n = 0; n < kTileRows / 8; ++n) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      p[n / 2][2 * (n % 2) + half] =
          pack<Bf16>(exp2_fast(fmaf(scores[n][2 * half], scale, shift[half])),
                     exp2_fast(fmaf(scores[n][2 * half + 1], scale, shift[half])));
    }
  }
}

template <int kDim>
__device__ inline void weigh_channels(float (&acc)[kDim / 8][4], const Weight& weight, int head,
                                      int dim_v) {
  const int t = threadIdx.x & 3;
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
    const int column = 8 * n + 2 * t;
    if (column >= dim_v) continue;
    const float low = channel_factor(weight, head, column);
    const float high = channel_factor(weight, head, column + 1);
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[n][i] *= i % 2 == 0 ? low : high;
  }
}

template <int kDim>
__global__ void __launch_bounds__(DiagRowsShape<kDim>::kThreads, 1)
    diag_rows_forward(const __grid_constant__ TiledCall tiled,
                      const __grid_constant__ TensorMaps maps, std::uint32_t jobs) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = DiagRowsShape<kDim>;
  LLN_DYNAMIC_SHARED(memory);
  auto& shared = *reinterpret_cast<typename Shape::Shared*>(memory);
  const DeviceCall& call = tiled.call;
  if (threadIdx.x == 0) shared.ring.init(1);
  __syncthreads();
  RingPlace<Shape::kSlots> ring;
  if (threadIdx.x >= Shape::kConsumers) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x > Shape::kConsumers) return;
    for (BlockTiles<false> tiles(tiled, jobs); tiles.more(); tiles.next(), ring.advance()) {
      Barrier& full = shared.ring.full[ring.slot];
      auto& to = shared.tiles[ring.slot];
      const TilePlace& at = tiles.place();
      wait(shared.ring.empty[ring.slot], ring.parity ^ 1);
      arrive_expecting(full, 3 * Shape::kTileBytes);
      load_tile<kDim>(to[0], maps.q, at, at.head, full);
      load_tile<kDim>(to[1], maps.k, at, at.head_k, full);
      load_tile<kDim>(to[2], maps.v, at, at.head_k, full);
    }
    return;
  }

  take_registers<kConsumerRegisters<Shape::kGroups>>();
  BlockTiles<false> tiles(tiled, jobs);
  wait_for_previous();
  let_next_start();
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const int block = static_cast<int>(call.diag_block);
  const float diag_scale = kLog2E * rsqrtf(static_cast<float>(call.channels));
  const int group = static_cast<int>(threadIdx.x) / 128;
  const int first = static_cast<int>(threadIdx.x) % 128 / 32 * 16;
  const ByColumns<kDim> operand(shared.operand, 0);
  Departures<kDim, Shape::kSlots> departures(shared.ring);
  std::int64_t s = -1;  // whose operand is in shared memory
  int head = -1;
  float scale = 0, taken_out = 0;
  int before_mine = group;  // tiles of the other groups
  for (; tiles.more(); tiles.next(), ring.advance()) {
    const TilePlace& at = tiles.place();
    if (at.s != s || at.head != head) {
      s = at.s;
      head = at.head;
      scale = scale_at(call.alpha, s, head) * kLog2E;
      const PanelFill<kDim, Shape::kConsumers> values(tiled.state.values_at(s, at.head_k),
                                                      tiled.state.row, dim, dim_v);
      const ChannelNumbers<kDim> c(tiled.state.c_at(s, at.head_k), dim);
      meet(1, Shape::kConsumers);
      taken_out = fill_exponents<Bf16, kDim>(shared.exponents, c, call.channels,
                                             static_cast<int>(threadIdx.x), Shape::kConsumers, 1);
      const float less = exp2f(-kHeadroom<Bf16>);
      values.write(shared.operand, [&](int l) { return shared.exponents.w[l] * less; });
      show_products();
      meet(1, Shape::kConsumers);
    }
    if (before_mine-- > 0) continue;
    before_mine = Shape::kGroups - 1;
    unsigned char* const tile = shared.tiles[ring.slot][0];
    unsigned char* const v_tile = shared.tiles[ring.slot][2];
    const std::uint64_t valid = tiles.valid();
    float lln[2], diag[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = first + (static_cast<int>(threadIdx.x) & 31) / 4 + 8 * half;
      const int row = at.row + min(own, at.count - 1);
      lln[half] = row_factor(call.lln_weight, tiles.sequence(), head)(row);
      diag[half] = row_factor(call.diag_weight, tiles.sequence(), head)(row);
    }
    wait(shared.ring.full[ring.slot], ring.parity);
    if (valid != ~std::uint64_t{0}) clear_rows<kDim, 128>(v_tile, valid, 2 + group);
    float scores[kTileRows / 8][4];
    begin_products();
    multiply<kDim / 16>(scores, ByRows<kTileRows>(tile, 0),
                        ByRows<kTileRows>(shared.tiles[ring.slot][1], 0), false);
    commit_products();
    std::uint32_t e[kDim / 16][4];
    float sum[4] = {};
    read_fragments(e, tile, first);
    exponentials(e, scale);
    multiply_vector(sum, e, shared.exponents.packed_w);
    wait_products<0>();
    settle(scores);
    if (!trusted(sum, shared.exponents)) {
      careful_tile<kDim>(tile, first, 0, kDim / kPanelChannels, at.rows(call.q, head), call.q.token,
                         at.count, dim, shared.exponents, scale, taken_out);
      read_fragments(e, tile, first);
      sum[0] = sum[2] = 0;
      multiply_vector(sum, e, shared.exponents.packed_w);
    }
    std::uint64_t seen[2];
    seen_in_block(seen, valid, block, first, kTileRows);
    mask_scores(scores, seen);
    float acc[kDim / 8][4], near[kDim / 8][4];
    begin_products();
    multiply_words(acc, e, operand, false);
    commit_products();
    settle(scores);  // their weights are made while the product runs
    std::uint32_t p[4][4];
    block_weights(p, scores, diag_scale);
    begin_products();
    multiply_words(near, p, ByColumns<kTileRows>(v_tile, 0), false);
    commit_products();
    float mass[4] = {};
    const std::uint32_t ones = pack<Bf16>(1, 1);
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      mma<Bf16>(mass, p[step][0], p[step][1], p[step][2], p[step][3], ones, ones);
    }
    const float room = exp2f(kHeadroom<Bf16>);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      lln[half] *= quick_inverse(sum[2 * half]) * room;
      diag[half] *= quick_inverse(mass[2 * half]);
    }
    wait_products<0>();
    settle(acc);
    settle(near);
    if (call.lln_weight.channel != 0) weigh_channels<kDim>(acc, call.lln_weight, head, dim_v);
    if (call.diag_weight.channel != 0) weigh_channels<kDim>(near, call.diag_weight, head, dim_v);
#pragma unroll
    for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        acc[n][i] = fmaf(near[n][i], diag[i >> 1], acc[n][i] * lln[i >> 1]);
      }
    }
    write_results(tile, first, acc);
    show_products();
    meet(2 + group, 128);
    if (whole_rows(at, call.sequences.tokens)) {
      departures.send(tile, maps.o, at, head);
    } else {
      store_some_rows<kDim>(tile, at.rows(call.o, head), call.o.token, at.count, dim_v);
      meet(2 + group, 128);
    }
    departures.leave(ring.slot);
  }
  departures.finish();
#endif
}

}  // namespace lln::cuda::sm90
