// How the Hopper kernels are organised: one block on a multiprocessor, whose last warpgroup keeps a
// ring of tiles in shared memory filled by the copy engine, whatever the warpgroups before it
// compute. Results take the place of the tile that they were made of and leave the same way. So
// bytes are under way all the time, and no register holds them.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sm90/tensor_map.h"
#include "cuda/sm90/wgmma.cuh"
#include "cuda/tiled_weights.cuh"

namespace lln::cuda::sm90 {

// Tiles as the copy engine writes them are panels of 64 channels (wgmma.cuh).
inline constexpr int kTileRows = 64, kPanelChannels = 64;
inline constexpr int kPanelBytes = kTileRows * kPanelRow;

// Registers of a thread: the last warpgroup, which copies and prepares, leaves what it does not
// need to those that compute. A block has what its threads get at its start, in eights each, and no
// more.
inline constexpr int kProducerThreads = 128, kProducerRegisters = 24;
template <int kGroups, int kGiven = kProducerRegisters>
inline constexpr int kConsumerRegisters =
    (512 / (kGroups + 1) / 8 * 8 * (kGroups + 1) - kGiven) / kGroups / 8 * 8;

// The barriers of a ring of tiles.
template <int kSlots>
struct RingBarriers {
  Barrier full[kSlots], empty[kSlots];

  // By one thread; __syncthreads() must follow.
  __device__ void init(int consumers) {
    for (int i = 0; i < kSlots; ++i) {
      barrier_init(full[i], 1);
      barrier_init(empty[i], consumers);
    }
    barriers_ready();
  }
};

// Where a thread is in the ring, every kStep-th slot of which is its own. Warpgroups that take
// tiles in turn must always meet the same slots: one that ran ahead of the others would otherwise
// take the end of an earlier phase of a slot for the end of its own.
template <int kSlots, int kStep = 1>
struct RingPlace {
  static_assert(kSlots % kStep == 0);
  int slot = 0;
  std::uint32_t parity = 0;
  __device__ void advance() {
    slot += kStep;
    if (slot >= kSlots) {
      slot -= kSlots;
      parity ^= 1;
    }
  }
  __device__ static RingPlace at(int tile) { return {tile % kSlots, (tile / kSlots) & 1U}; }
};

// Where a tile lies in the tensors.
struct TilePlace {
  std::int64_t s = -1;  // sequence
  int head = 0, head_k = 0, batch = 0;
  int token = 0;  // in the tensor
  int row = 0;    // in the sequence
  int count = 0;  // rows of the tile that belong to the sequence

  // Its first row in a tensor with this head.
  __device__ Bf16* rows(const Rows& tensor, int of_head) const {
    return static_cast<Bf16*>(tensor.data) + batch * tensor.batch + of_head * tensor.head +
           token * tensor.token;
  }
};

// All blocks of one tile, by one thread.
template <int kDim>
__device__ inline void load_tile(unsigned char* to, const CUtensorMap& map, const TilePlace& at,
                                 int head, Barrier& full) {
#pragma unroll
  for (int panel = 0; panel < kDim / kPanelChannels; ++panel) {
    load_box(to + panel * kPanelBytes, map, panel * kPanelChannels, at.token, head, at.batch, full);
  }
}

// Rows `first` .. + 15 of a tile as left operands, channels in natural order.
template <int kSteps>
__device__ inline void read_fragments(std::uint32_t (&a)[kSteps][4], const unsigned char* tile,
                                      int first) {
  const int lane = threadIdx.x & 31, row = first + (lane & 15);
  const std::uint32_t base = shared_address(tile);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    load_matrices(a[step], base + panel_offset<kTileRows>(row, 2 * step + (lane >> 4)));
  }
}

// Rows without a bit in `valid` become zeros: what they hold may be anything, and 0 times that is
// not 0. By the kThreads threads of the warpgroups that share the tile.
template <int kDim, int kThreads>
__device__ inline void clear_rows(unsigned char* tile, std::uint64_t valid, int barrier) {
  constexpr int kPieces = kDim / 8;
  for (int i = static_cast<int>(threadIdx.x) % kThreads; i < kTileRows * kPieces; i += kThreads) {
    const int row = i / kPieces, piece = i % kPieces;
    if (((valid >> row) & 1) != 0) continue;
    *reinterpret_cast<uint4*>(tile + panel_offset<kTileRows>(row, piece)) = {0, 0, 0, 0};
  }
  show_products();
  meet(barrier, kThreads);
}

// Results of 16 rows from `first` on into a tile.
template <int kCount>
__device__ inline void write_results(unsigned char* tile, int first,
                                     const float (&acc)[kCount][4]) {
  const int lane = threadIdx.x & 31, row = first + (lane & 15);
  const std::uint32_t base = shared_address(tile);
#pragma unroll
  for (int step = 0; step < kCount / 2; ++step) {
    const float *const low = acc[2 * step], *const high = acc[2 * step + 1];
    store_matrices(base + panel_offset<kTileRows>(row, 2 * step + (lane >> 4)),
                   pack<Bf16>(low[0], low[1]), pack<Bf16>(low[2], low[3]),
                   pack<Bf16>(high[0], high[1]), pack<Bf16>(high[2], high[3]));
  }
}

// Whether the copy engine may write a tile: it stops at the end of the tensor, not of the sequence.
__device__ inline bool whole_rows(const TilePlace& at, std::int64_t tokens) {
  return at.count == kTileRows || at.token + at.count == tokens;
}

// The first `count` rows of a tile, without the copy engine: it would write the rows of the next
// sequence too. By the 128 threads of a warpgroup, which meet before and after.
template <int kDim>
__device__ inline void store_some_rows(const unsigned char* tile, Bf16* rows, std::int64_t stride,
                                       int count, int dim) {
  constexpr int kPieces = kDim / 8;
  for (int i = static_cast<int>(threadIdx.x) & 127; i < count * kPieces; i += 128) {
    const int row = i / kPieces, piece = i % kPieces;
    if (8 * piece >= dim) continue;
    *reinterpret_cast<uint4*>(rows + row * stride + 8 * piece) =
        *reinterpret_cast<const uint4*>(tile + panel_offset<kTileRows>(row, piece));
  }
}

// Results of a warpgroup on their way from the ring to device memory. A slot is free again when the
// copy engine has read it, which is not waited for before the next results leave. kArrivals: what
// the ring's barriers expect.
template <int kDim, int kSlots, int kArrivals = 1>
class Departures {
 public:
  __device__ explicit Departures(RingBarriers<kSlots>& ring) : ring_(ring) {}

  // After all threads of the group have written and published results and met: sends a tile. The
  // slot is not free before leave().
  __device__ void send(const unsigned char* tile, const CUtensorMap& map, const TilePlace& at,
                       int head) const {
    if (!elected()) return;
#pragma unroll
    for (int panel = 0; panel < kDim / kPanelChannels; ++panel) {
      store_box(map, tile + panel * kPanelBytes, panel * kPanelChannels, at.token, head, at.batch);
    }
  }
  __device__ void leave(int slot) {
    if (!elected()) return;
    stores_commit();
    if (leaving_ >= 0) {
      stores_wait_read<1>();
      arrive<kArrivals>(ring_.empty[leaving_]);
    }
    leaving_ = slot;
  }
  // At the end: shared memory must outlive the copies.
  __device__ void finish() {
    if (elected()) stores_wait_read<0>();
  }

 private:
  __device__ static bool elected() { return (threadIdx.x & 127) == 0; }
  RingBarriers<kSlots>& ring_;
  int leaving_ = -1;
};

// An f32 matrix [dim, dim_v], whose rows are aligned to 16 bytes, on its way to panels in shared
// memory: asked for when this is made, so that memory answers while something else is waited for,
// and written later, row l times factor_of(l), with zeros past its end. By kThreads threads.
template <int kDim, int kThreads>
class PanelFill {
  static constexpr int kPieces = kDim / 8;                                   // of a row
  static constexpr int kCount = (kDim * kPieces + kThreads - 1) / kThreads;  // of a thread
  // Of them in registers; heads of 128 channels have none to spare.
  static constexpr int kAhead = kDim == kPanelChannels ? kCount : 0;

 public:
  __device__ PanelFill(const float* matrix, std::int64_t row_stride, int dim, int dim_v)
      : matrix_(matrix), row_stride_(row_stride), dim_(dim), dim_v_(dim_v) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) ahead_[u] = load(index(u));
  }

  template <class Factor>
  __device__ void write(unsigned char* operand, Factor&& factor_of) const {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) put(operand, index(u), ahead_[u], factor_of);
#pragma unroll 2
    for (int u = kAhead; u < kCount; ++u) put(operand, index(u), load(index(u)), factor_of);
  }

 private:
  struct Numbers {
    float4 low, high;
  };

  __device__ static int index(int u) { return static_cast<int>(threadIdx.x) + u * kThreads; }

  __device__ Numbers load(int i) const {
    const int l = i / kPieces, piece = i % kPieces;
    if (l >= dim_ || 8 * piece >= dim_v_) return {{0, 0, 0, 0}, {0, 0, 0, 0}};
    const float* const from = matrix_ + l * row_stride_ + 8 * piece;
    return {*reinterpret_cast<const float4*>(from), *reinterpret_cast<const float4*>(from + 4)};
  }

  template <class Factor>
  __device__ static void put(unsigned char* operand, int i, const Numbers& x, Factor&& factor_of) {
    if (i >= kDim * kPieces) return;
    const int l = i / kPieces, piece = i % kPieces;
    const float factor = factor_of(l);
    *reinterpret_cast<uint4*>(operand + panel_offset<kDim>(l, piece)) = {
        pack<Bf16>(x.low.x * factor, x.low.y * factor),
        pack<Bf16>(x.low.z * factor, x.low.w * factor),
        pack<Bf16>(x.high.x * factor, x.high.y * factor),
        pack<Bf16>(x.high.z * factor, x.high.w * factor)};
  }

  const float* matrix_;
  std::int64_t row_stride_;
  int dim_, dim_v_;
  Numbers ahead_[kAhead > 0 ? kAhead : 1];
};

// 2^(x scale) of fragments.
template <int kSteps>
__device__ inline void exponentials(std::uint32_t (&a)[kSteps][4], float scale) {
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = unpack<Bf16>(a[step][i]);
      a[step][i] = pack<Bf16>(exp2_fast(pair.x * scale), exp2_fast(pair.y * scale));
    }
  }
}

// sum[0], sum[2] grow by rows g and g + 8 of fragments times packed 16-bit numbers, one for each
// channel.
template <int kSteps>
__device__ inline void multiply_vector(float (&sum)[4], const std::uint32_t (&a)[kSteps][4],
                                       const uint4* vector) {
  const auto* const words = reinterpret_cast<const std::uint32_t*>(vector) + (threadIdx.x & 3);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
    mma<Bf16>(sum, a[step][0], a[step][1], a[step][2], a[step][3], words[8 * step],
              words[8 * step + 4]);
  }
}

// This warp's rows of a tile of q, from `first` on, become e with the reference that fits each of
// them (careful_weights), in blocks [block, block_end) of the tile; q is read from memory, and rows
// past the last one are the last one again. Not inlined: it is for rare rows, and its registers
// would be everybody's.
template <int kDim>
__device__ __noinline__ void careful_tile(unsigned char* tile, int first, int block, int block_end,
                                          const Bf16* q, std::int64_t stride, int count, int dim,
                                          const RowExponents<kDim>& exponents, float scale,
                                          float taken_out) {
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
  __syncwarp();  // what other lanes have read of the tile is written over
  for (int half = 0; half < 2; ++half) {
    const int row = first + g + 8 * half;
    const Bf16* const from = q + min(row, count - 1) * stride;
    const auto exponent = [&](int l) {
      return l < dim ? clamp_keep_nan(__bfloat162float(from[l]) * scale) : 0.0F;
    };
    float top = -kLargestExponent;
    for (int l = 2 * t; l < kDim; l += 8) {
      top = fmaxf(top, exponent(l) + exponents.c[l]);
      top = fmaxf(top, exponent(l + 1) + exponents.c[l + 1]);
    }
    const float reference = quad_max(top) - taken_out;
    for (int n = 8 * block; n < 8 * block_end; ++n) {
      const int l = 8 * n + 2 * t;
      *reinterpret_cast<std::uint32_t*>(tile + panel_offset<kTileRows>(row, n) + 4 * t) =
          pack<Bf16>(exp2_fast(exponent(l) + exponents.added[l] - reference),
                     exp2_fast(exponent(l + 1) + exponents.added[l + 1] - reference));
    }
  }
  __syncwarp();
}

}  // namespace lln::cuda::sm90
