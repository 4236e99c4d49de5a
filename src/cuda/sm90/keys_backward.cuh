// The backward pass over keys of LLN on Hopper: dv = Kn dC and dk = beta Kn (v dC^T - t)
// (tiled_keys_backward.cuh). One matrix serves both products, summed over its rows and over its
// channels; dk takes the place of k in the ring, dv that of v.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sm90/tile_stream.cuh"
#include "cuda/tiled_keys.cuh"
#include "cuda/tiled_keys_backward.cuh"

namespace lln::cuda::sm90 {

// Of the channels of a key head, in shared memory.
template <int kDim>
struct KeyVectors {
  float added[kDim], factors[kDim], t_sums[kDim];
};

template <int kDim>
struct KeysBackwardShape {
  static constexpr int kGroups = 3;
  static constexpr int kConsumers = 128 * kGroups, kThreads = kConsumers + kProducerThreads;
  static constexpr int kTileBytes = kTileRows * kDim * 2;
  static constexpr int kSlots = kDim == 64 ? 9 : 6;
  static_assert(kSlots % kGroups == 0);  // RingPlace
  struct alignas(1024) Shared {
    unsigned char tiles[kSlots][2][kTileBytes];  // k, v
    unsigned char operand[kDim * kDim * 2];      // dC
    KeyVectors<kDim> vectors;
    RingBarriers<kSlots> ring;
  };
};

// A block's run of key tiles, as RowTiles; a job may hold several.
class KeyTiles {
 public:
  __device__ KeyTiles(const TiledCall& tiled, std::uint32_t jobs) : tiled_(tiled), jobs_(jobs) {
    const std::uint64_t items =
        std::uint64_t{jobs} * static_cast<std::uint32_t>(tiled.call.heads_k);
    item_ = static_cast<std::uint32_t>(items * blockIdx.x / gridDim.x);
    last_ = static_cast<std::uint32_t>(items * (blockIdx.x + 1) / gridDim.x);
    find();
  }
  __device__ bool more() const { return item_ < last_; }
  __device__ const TilePlace& place() const { return place_; }
  __device__ const DeviceSequence& sequence() const { return sequence_; }
  __device__ void next() {
    place_.row += kTileRows;
    place_.token += kTileRows;
    if (place_.row < end_) {
      place_.count = min(kTileRows, end_ - place_.row);
    } else {
      ++item_;
      find();
    }
  }

 private:
  __device__ void find() {
    for (; item_ < last_; ++item_) {
      const KeyRows keys = key_rows(tiled_, item_ % jobs_, item_ / jobs_);
      if (keys.s < 0 || keys.count <= 0) continue;
      sequence_ = keys.sequence;
      const int row = static_cast<int>(keys.begin), head = static_cast<int>(keys.head);
      end_ = row + keys.count;
      place_ = {keys.s,
                head,
                head,
                static_cast<int>(sequence_.batch),
                static_cast<int>(sequence_.k_begin) + row,
                row,
                min(kTileRows, keys.count)};
      return;
    }
  }

  const TiledCall& tiled_;
  std::uint32_t jobs_, item_, last_;
  int end_ = 0;
  TilePlace place_;
  DeviceSequence sequence_;
};

// Kn of fragments up to the factors that are folded into dC (key_weights).
template <int kSteps>
__device__ inline void key_weights(std::uint32_t (&k)[kSteps][4], const float* added, float scale,
                                   bool folded) {
  if (folded) {
    exponentials(k, scale);
    return;
  }
  const float* const own = added + 2 * (threadIdx.x & 3);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack<Bf16>(k[step][i]);
      const float* const x = own + 16 * step + 8 * (i >> 1);
      k[step][i] = pack<Bf16>(exp2_fast(clamp_keep_nan(pair.x * scale) + x[0]),
                              exp2_fast(clamp_keep_nan(pair.y * scale) + x[1]));
    }
  }
}

// dC, t and what c folds into them, for one sequence and key head; whether c was folded. By
// kThreads threads, which meet at barrier 1: first, when all have read what is written over.
template <int kDim, int kThreads>
__device__ inline bool fill_gradients(unsigned char* operand, KeyVectors<kDim>& vectors,
                                      const TiledCall& tiled, std::int64_t s, int head_k) {
  const int dim = static_cast<int>(tiled.call.dim), dim_v = static_cast<int>(tiled.call.dim_v);
  const PanelFill<kDim, kThreads> values(tiled.grads.values_at(s, head_k), tiled.grads.row, dim,
                                         dim_v);
  const ChannelNumbers<kDim> c(tiled.state.c_at(s, head_k), dim);
  const ChannelNumbers<kDim> t(tiled.grads.c_at(s, head_k), dim);
  meet(1, kThreads);
  bool folded = true;
  for (int l = static_cast<int>(threadIdx.x) & 31; l < dim; l += 32) {
    folded = folded && fabsf(c.of(l) * kLog2E) <= kModerateExponent;
  }
  folded = __all_sync(0xFFFFFFFFU, folded);
  for (int l = static_cast<int>(threadIdx.x); l < kDim; l += kThreads) {
    const float x = l < dim ? -c.of(l) * kLog2E : -INFINITY;
    vectors.added[l] = folded ? 0 : x;
    vectors.factors[l] = l >= dim ? 0 : folded ? exp2f(x) : 1;
    vectors.t_sums[l] = l < dim ? t.of(l) * vectors.factors[l] : 0;
  }
  meet(1, kThreads);
  values.write(operand, [&](int l) { return vectors.factors[l]; });
  show_products();
  meet(1, kThreads);
  return folded;
}

// v dC^T becomes dk.
template <int kDim>
__device__ inline void finish_keys(float (&acc)[kDim / 8][4],
                                   const std::uint32_t (&kn)[kDim / 16][4], const float* t_sums,
                                   float beta) {
  const float* const own = t_sums + 2 * (threadIdx.x & 3);
#pragma unroll
  for (int n = 0; n < kDim / 8; ++n) {
    const float2 sum = *reinterpret_cast<const float2*>(own + 8 * n);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 weight = unpack<Bf16>(kn[n / 2][2 * (n % 2) + half]);
      float* const x = acc[n] + 2 * half;
      x[0] = beta * weight.x * (x[0] - sum.x);
      x[1] = beta * weight.y * (x[1] - sum.y);
    }
  }
}

template <int kDim>
__global__ void __launch_bounds__(KeysBackwardShape<kDim>::kThreads, 1)
    keys_backward(const __grid_constant__ TiledCall tiled, const __grid_constant__ TensorMaps maps,
                  std::uint32_t jobs) {
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
  using Shape = KeysBackwardShape<kDim>;
  LLN_DYNAMIC_SHARED(memory);
  auto& shared = *reinterpret_cast<typename Shape::Shared*>(memory);
  const DeviceCall& call = tiled.call;
  if (threadIdx.x == 0) shared.ring.init(1);
  __syncthreads();
  KeyTiles tiles(tiled, jobs);
  RingPlace<Shape::kSlots> ring;
  if (threadIdx.x >= Shape::kConsumers) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x > Shape::kConsumers) return;
    for (; tiles.more(); tiles.next(), ring.advance()) {
      Barrier& full = shared.ring.full[ring.slot];
      const TilePlace& at = tiles.place();
      wait(shared.ring.empty[ring.slot], ring.parity ^ 1);
      arrive_expecting(full, 2 * Shape::kTileBytes);
      load_tile<kDim>(shared.tiles[ring.slot][1], maps.v, at, at.head, full);
      load_tile<kDim>(shared.tiles[ring.slot][0], maps.k, at, at.head, full);
    }
    return;
  }

  take_registers<kConsumerRegisters<Shape::kGroups>>();
  wait_for_previous();
  let_next_start();
  const int dim = static_cast<int>(call.dim), dim_v = static_cast<int>(call.dim_v);
  const int group = static_cast<int>(threadIdx.x) / 128;
  const int first = static_cast<int>(threadIdx.x) % 128 / 32 * 16;
  const int row_of_lane = first + (static_cast<int>(threadIdx.x) & 31) / 4;
  const ByRows<kDim> by_rows(shared.operand, 0);
  const ByColumns<kDim> by_columns(shared.operand, 0);
  Departures<kDim, Shape::kSlots> departures(shared.ring);
  std::int64_t s = -1;  // whose dC is in shared memory
  int head = -1;
  float beta = 0;
  bool folded = false;
  int before_mine = group;  // tiles of the other groups
  for (; tiles.more(); tiles.next(), ring.advance()) {
    const TilePlace& at = tiles.place();
    if (at.s != s || at.head != head) {
      s = at.s;
      head = at.head;
      beta = scale_at(call.beta, s, head);
      folded =
          fill_gradients<kDim, Shape::kConsumers>(shared.operand, shared.vectors, tiled, s, head);
    }
    if (before_mine-- > 0) continue;
    before_mine = Shape::kGroups - 1;
    unsigned char *const k_tile = shared.tiles[ring.slot][0], *const v_tile =
                                                                  shared.tiles[ring.slot][1];
    const std::int64_t end = min(at.row + kTileRows, static_cast<int>(tiles.sequence().key_end));
    const std::uint64_t bits =
        valid_keys(call.sequences, tiles.sequence(), at.row, end) >> row_of_lane;
    const bool valid[2] = {(bits & 1) != 0, ((bits >> 8) & 1) != 0};
    const bool all_valid = __all_sync(0xFFFFFFFFU, valid[0] && valid[1]);
    wait(shared.ring.full[ring.slot], ring.parity);
    float acc[kDim / 8][4];
    begin_products();
    multiply<kDim / 16>(acc, ByRows<kTileRows>(v_tile, 0), by_rows, false);
    commit_products();
    std::uint32_t kn[kDim / 16][4];
    read_fragments(kn, k_tile, first);
    key_weights(kn, shared.vectors.added, beta * kLog2E, folded);
    wait_products<0>();
    settle(acc);
    finish_keys<kDim>(acc, kn, shared.vectors.t_sums, beta);
    if (!all_valid) zero_rows(acc, valid);
    write_results(k_tile, first, acc);
    begin_products();
    multiply_words(acc, kn, by_columns, false);
    commit_products();
    wait_products<0>();
    settle(acc);
    if (!all_valid) zero_rows(acc, valid);
    meet(2 + group, 128);  // all of v has been read
    write_results(v_tile, first, acc);
    show_products();
    meet(2 + group, 128);
    if (whole_rows(at, call.sequences.tokens_k)) {
      departures.send(k_tile, maps.dk, at, head);
      departures.send(v_tile, maps.dv, at, head);
    } else {
      store_some_rows<kDim>(k_tile, at.rows(call.dk, head), call.dk.token, at.count, dim);
      store_some_rows<kDim>(v_tile, at.rows(call.dv, head), call.dv.token, at.count, dim_v);
      meet(2 + group, 128);
    }
    departures.leave(ring.slot);
  }
  departures.finish();
#endif
}

}  // namespace lln::cuda::sm90
