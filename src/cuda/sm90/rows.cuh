// The forward pass over rows of LLN on Hopper: o = W C. Blocks share the rows of all heads evenly,
// each a run of neighbouring tiles, so that the operand w C is made anew only where the run enters
// another head.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sm90/tile_stream.cuh"
#include "cuda/tiled_rows.cuh"

namespace lln::cuda::sm90 {

// What rows of one head are multiplied with, in shared memory.
template <int kDim>
struct RowOperand {
  alignas(1024) unsigned char panels[kDim * kDim * 2];  // w C
  RowExponents<kDim> exponents;

  // By the kThreads threads that compute, after their last product with the operand before.
  // Returns what was taken out of w (fill_exponents).
  template <int kThreads>
  __device__ float fill(const TiledCall& tiled, std::int64_t s, int head_k) {
    const auto dim = static_cast<int>(tiled.call.dim), dim_v = static_cast<int>(tiled.call.dim_v);
    const PanelFill<kDim, kThreads> values(tiled.state.values_at(s, head_k), tiled.state.row, dim,
                                           dim_v);
    const ChannelNumbers<kDim> c(tiled.state.c_at(s, head_k), dim);
    meet(1, kThreads);
    const float taken_out = fill_exponents<Bf16, kDim>(exponents, c, tiled.call.channels,
                                                       static_cast<int>(threadIdx.x), kThreads, 1);
    values.write(panels, [&](int l) { return exponents.w[l]; });
    show_products();
    meet(1, kThreads);
    return taken_out;
  }
};

template <int kDim>
struct RowsShape {
  static constexpr int kGroups = 3;  // warpgroups that compute
  static constexpr int kConsumers = 128 * kGroups, kThreads = kConsumers + kProducerThreads;
  static constexpr int kTileBytes = kTileRows * kDim * 2;
  static constexpr int kSlots = kDim == 64 ? 18 : 9;
  static_assert(kSlots % kGroups == 0);  // RingPlace
  struct alignas(1024) Shared {
    unsigned char tiles[kSlots][kTileBytes];
    RowOperand<kDim> operand;
    RingBarriers<kSlots> ring;
  };
};

// A block's run of row tiles: items are tiles of 64 rows, those of a sequence behind each other,
// then the sequences, then the heads.
class RowTiles {
 public:
  __device__ RowTiles(const DeviceCall& call, std::uint32_t jobs) : call_(call), jobs_(jobs) {
    const std::uint64_t items = std::uint64_t{jobs} * static_cast<std::uint32_t>(call.heads);
    item_ = static_cast<std::uint32_t>(items * blockIdx.x / gridDim.x);
    last_ = static_cast<std::uint32_t>(items * (blockIdx.x + 1) / gridDim.x);
    find();
  }
  __device__ bool more() const { return item_ < last_; }
  __device__ const TilePlace& place() const { return place_; }
  __device__ void next() {
    ++item_;
    place_.row += kTileRows;
    place_.token += kTileRows;
    if (place_.row < tokens_) {
      place_.count = min(kTileRows, tokens_ - place_.row);
    } else {
      find();
    }
  }

 private:
  // The next item that has rows, from item_ on.
  __device__ void find() {
    for (; item_ < last_; ++item_) {
      const RowPiece piece = find_rows(call_, item_ % jobs_, item_ / jobs_);
      if (piece.s < 0 || piece.count <= 0) continue;
      tokens_ = static_cast<int>(piece.sequence.q_tokens);
      const int row = static_cast<int>(piece.begin);
      place_ = {piece.s,
                static_cast<int>(piece.head),
                static_cast<int>(piece.head_k),
                static_cast<int>(piece.sequence.batch),
                static_cast<int>(piece.sequence.q_begin) + row,
                row,
                min(kTileRows, tokens_ - row)};
      return;
    }
  }

  const DeviceCall& call_;
  std::uint32_t jobs_, item_, last_;
  int tokens_ = 0;
  TilePlace place_;
};

// A tile of q becomes one of o, in its place, and leaves. By the 128 threads of warpgroup `group`.
template <int kDim, class Leaving>
__device__ inline void forward_tile(unsigned char* tile, const TilePlace& at,
                                    const RowOperand<kDim>& operand, float scale, float taken_out,
                                    const DeviceCall& call, const CUtensorMap& o, int group,
                                    Leaving& departures) {
  const auto dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const int first = static_cast<int>(threadIdx.x) % 128 / 32 * 16;
  const RowExponents<kDim>& exponents = operand.exponents;
  std::uint32_t e[kDim / 16][4];
  float sum[4] = {};
  read_fragments(e, tile, first);
  exponentials(e, scale);
  multiply_vector(sum, e, exponents.packed_w);
  if (!trusted(sum, exponents)) {
    careful_tile<kDim>(tile, first, 0, kDim / kPanelChannels, at.rows(call.q, at.head),
                       call.q.token, at.count, dim, exponents, scale, taken_out);
    read_fragments(e, tile, first);
    sum[0] = sum[2] = 0;
    multiply_vector(sum, e, exponents.packed_w);
  }
  float acc[kDim / 8][4];
  begin_products();
  multiply_words(acc, e, ByColumns<kDim>(operand.panels, 0), false);
  commit_products();
  const float inverse[2] = {inverse_of(sum[0]), inverse_of(sum[2])};
  wait_products<0>();
  settle(acc);
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[n][i] *= inverse[i >> 1];
  }
  write_results(tile, first, acc);
  show_products();
  meet(2 + group, 128);
  if (whole_rows(at, call.sequences.tokens)) {
    departures.send(tile, o, at, at.head);
  } else {
    store_some_rows<kDim>(tile, at.rows(call.o, at.head), call.o.token, at.count, dim_v);
    meet(2 + group, 128);
  }
}

template <int kDim>
__global__ void __launch_bounds__(RowsShape<kDim>::kThreads, 1)
    rows_forward(const __grid_constant__ TiledCall tiled, const __grid_constant__ TensorMaps maps,
                 std::uint32_t jobs) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = RowsShape<kDim>;
  LLN_DYNAMIC_SHARED(memory);
  auto& shared = *reinterpret_cast<typename Shape::Shared*>(memory);
  const DeviceCall& call = tiled.call;
  if (threadIdx.x == 0) shared.ring.init(1);
  __syncthreads();
  RowTiles tiles(call, jobs);
  RingPlace<Shape::kSlots> ring;
  if (threadIdx.x >= Shape::kConsumers) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x > Shape::kConsumers) return;
    for (; tiles.more(); tiles.next(), ring.advance()) {
      Barrier& full = shared.ring.full[ring.slot];
      wait(shared.ring.empty[ring.slot], ring.parity ^ 1);
      arrive_expecting(full, Shape::kTileBytes);
      load_tile<kDim>(shared.tiles[ring.slot], maps.q, tiles.place(), tiles.place().head, full);
    }
    return;
  }

  take_registers<kConsumerRegisters<Shape::kGroups>>();
  wait_for_previous();
  let_next_start();
  const int group = static_cast<int>(threadIdx.x) / 128;
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
      taken_out = shared.operand.template fill<Shape::kConsumers>(tiled, s, at.head_k);
    }
    if (before_mine-- > 0) continue;
    before_mine = Shape::kGroups - 1;
    wait(shared.ring.full[ring.slot], ring.parity);
    forward_tile(shared.tiles[ring.slot], at, shared.operand, scale, taken_out, call, maps.o, group,
                 departures);
    departures.leave(ring.slot);
  }
  departures.finish();
#endif
}

}  // namespace lln::cuda::sm90
