// The first backward pass of LLN+Diag on Hopper: dC = (w1 W)^T g and t = (w1 W)^T delta for each
// piece of a sequence, as rows_backward.cuh makes them, without dq. A block of Diag is closed in
// itself, so that with these sums the second pass (diag_backward.cuh) makes dq, dk and dv of a
// block in one reading of q, g, k and v.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sm90/diag_tiles.cuh"
#include "cuda/sm90/rows_backward.cuh"

namespace lln::cuda::sm90 {

// One item is a row job and query head, as find_rows() numbers them.
template <int kDim>
__global__ void __launch_bounds__(RowsBackwardShape<kDim>::kThreads, 1)
    diag_row_sums(const __grid_constant__ TiledCall tiled, const __grid_constant__ TensorMaps maps,
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
  const int row_of_lane = first + (static_cast<int>(threadIdx.x) & 31) / 4;
  RingPlace<Shape::kSlots, Shape::kTeams> ring{own.team};
  std::uint32_t summed = 0;  // parity of the pieces
  for (std::uint32_t item = blockIdx.x; item < items; item += gridDim.x) {
    const RowPiece piece = find_rows(call, item);
    if (piece.s < 0) continue;
    own.begin(tiled, piece);
    const RowFactor weight = row_factor(call.lln_weight, piece.sequence, piece.head);

    float dc[kDim / 8][4] = {};
    float t[4] = {};
    TilePlace at = first_tile(piece);
    at.row += own.team * kTileRows;
    int turn = 0;
    int leaving = -1;  // the slot that the products of the tile before still read
    const int own_rounds = rounds<Shape::kTeams>(piece.count);
    for (int round = 0; round < own_rounds;
         ++round, ring.advance(), at.row += Shape::kTeams * kTileRows) {
      if (at.row >= piece.count) {
        wait(shared.ring.full[ring.slot], ring.parity);
        meet(kGroupMeets + group, 128);  // all have seen the slot (keys.cuh)
        if (elected) arrive(shared.ring.empty[ring.slot]);
        continue;
      }
      at.count = min(kTileRows, piece.count - at.row);
      const std::int64_t begin = piece.begin + at.row;
      const float factor[2] = {weight(begin + min(row_of_lane, at.count - 1)),
                               weight(begin + min(row_of_lane + 8, at.count - 1))};
      wait(shared.ring.full[ring.slot], ring.parity);
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
        const Bf16* const q =
            piece.template rows<const Bf16>(call.q) + std::int64_t{at.row} * call.q.token;
        careful_tile<kDim>(tiles[0], first, part, part + 1, q, call.q.token, at.count, dim,
                           shared.exponents, own.alpha * kLog2E, own.taken_out);
        read_fragments(e, q_block, first);
        own.sum_rows(e, dw, mass, dot);
        own.exchange(mass, dot, 2, kPairMeets + first / 16, 64);
      }
      const float inverse[2] = {inverse_of(mass[0]), inverse_of(mass[1])};
      const float delta[2] = {dot[0] * inverse[0], dot[1] * inverse[1]};
      const float share[2] = {inverse[0] * factor[0], inverse[1] * factor[1]};
      own.finish(e, dw, share, delta, at.count);
      auto& operand = shared.operands[group][Shape::kOperands > 1 ? turn : 0];
      own.write_operand(operand, e, delta, at.count);
      show_products();
      meet(kGroupMeets + group, 128);
      if (elected && leaving >= 0) arrive(shared.ring.empty[leaving]);
      leaving = ring.slot;
      own.start_sums(dc, t, operand, tiles[1]);
      turn ^= 1;
    }
    wait_products<0>();
    settle(dc);
    settle(t);
    meet(kGroupMeets + group, 128);
    if (elected && leaving >= 0) arrive(shared.ring.empty[leaving]);
    add_teams<kDim>(dc, t, shared, summed);
    summed ^= 1;
    if (own.team == 0) write_row_sums<kDim>(tiled, dc, t, shared.exponents.w, item);
  }
#endif
}

}  // namespace lln::cuda::sm90
