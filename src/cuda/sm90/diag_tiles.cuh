// LLN+Diag on Hopper, what its passes share: which tiles of rows a block takes with the keys that
// they meet in Diag, and the weights of a tile of 64 rows and 64 keys.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/sm90/tile_stream.cuh"
#include "cuda/tiled_diag_rows.cuh"
#include "cuda/tiled_keys_backward.cuh"

namespace lln::cuda::sm90 {

static_assert(kTileRows == kDiagTile);

// A block's run of tiles, from its last one to its first: the pass before went the other way, and
// what it read last is still in the cache. Tiles begin where blocks of Diag do, at multiples of 64
// tokens from the first valid key; rows before that key and not on such a tile are one of their
// own. Rows and keys are the same tokens. kKeys: one run for each key head instead of each query
// head.
template <bool kKeys>
class BlockTiles {
 public:
  __device__ BlockTiles(const TiledCall& tiled, std::uint32_t jobs) : tiled_(tiled), jobs_(jobs) {
    const DeviceCall& call = tiled.call;
    const std::uint64_t items =
        std::uint64_t{jobs} * static_cast<std::uint32_t>(kKeys ? call.heads_k : call.heads);
    first_ = static_cast<std::uint32_t>(items * blockIdx.x / gridDim.x);
    item_ = static_cast<std::uint32_t>(items * (blockIdx.x + 1) / gridDim.x);
    find();
  }
  __device__ bool more() const { return item_ > first_; }
  __device__ const TilePlace& place() const { return place_; }
  __device__ const DeviceSequence& sequence() const { return sequence_; }
  __device__ void next() {
    if (place_.row > begin_) {
      const int row = max(begin_, place_.row - kTileRows);
      place_.count = place_.row - row;
      place_.token -= place_.count;
      place_.row = row;
    } else {
      --item_;
      find();
    }
  }

  // Bit j: whether key j of the tile counts.
  __device__ std::uint64_t valid() const {
    const std::int64_t end = min(place_.row + place_.count, static_cast<int>(sequence_.key_end));
    return valid_keys(tiled_.call.sequences, sequence_, place_.row, end);
  }

 private:
  // The last tile of item_ - 1, or of the first item before it that has one. Items of the same
  // sequence before that one are taken together with it.
  __device__ void find() {
    const DeviceCall& call = tiled_.call;
    for (; item_ > first_; --item_) {
      const std::uint32_t job = (item_ - 1) % jobs_, head = (item_ - 1) / jobs_;
      std::int64_t from;
      int log2;
      if constexpr (kKeys) {
        const KeyRows keys = key_rows(tiled_, job, head);
        place_.s = keys.s;
        place_.head_k = static_cast<int>(head);
        sequence_ = keys.sequence;
        from = keys.begin;
        log2 = tiled_.key_rows_piece_log2 > 0
                   ? tiled_.key_rows_piece_log2
                   : call.sequences.k_jobs.piece_log2(sequence_.k_tokens);
      } else {
        const RowPiece rows = find_rows(call, job, head);
        place_.s = rows.s;
        place_.head_k = static_cast<int>(rows.head_k);
        sequence_ = rows.sequence;
        from = rows.begin;
        log2 = call.sequences.q_jobs.piece_log2(sequence_.q_tokens);
      }
      if (place_.s < 0) continue;
      const int tokens = static_cast<int>(sequence_.q_tokens);
      const int shift = static_cast<int>(sequence_.key_first % kTileRows);
      const auto border = [&](std::int64_t row) {
        return row == 0 ? 0 : static_cast<int>(min(row + shift, std::int64_t{tokens}));
      };
      const std::int64_t to = from + (std::int64_t{1} << log2);
      const int end = to >= tokens ? tokens : border(to);
      if (end <= border(from)) continue;
      const std::uint32_t more = min(static_cast<std::uint32_t>(from >> log2), item_ - 1 - first_);
      item_ -= more;
      begin_ = border(from - (std::int64_t{more} << log2));
      const int row = max(begin_, (end - 1 - shift) / kTileRows * kTileRows + shift);
      place_.head = static_cast<int>(head);
      place_.batch = static_cast<int>(sequence_.batch);
      place_.token = static_cast<int>(sequence_.q_begin) + row;
      place_.row = row;
      place_.count = end - row;
      return;
    }
  }

  const TiledCall& tiled_;
  std::uint32_t jobs_, first_, item_;  // the items from first_ on and before item_ are left
  int begin_ = 0;                      // the first row of the items under way
  TilePlace place_;
  DeviceSequence sequence_;
};

// Bit j: whether rows lane / 4 and + 8 of this warp's 16 rows of a tile see key j. The block is a
// power of two of at most 64; rows from `count` on see nothing.
__device__ inline void seen_in_block(std::uint64_t (&seen)[2], std::uint64_t valid, int block,
                                     int first, int count) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = first + (static_cast<int>(threadIdx.x) & 31) / 4 + 8 * half;
    seen[half] = row < count ? valid & low_bits(block) << (row & -block) : 0;
  }
}

// Scores of 64 rows and 64 keys before they are scaled: the largest of rows lane / 4 and + 8.
__device__ inline void find_tops(float (&top)[2], const float (&scores)[kTileRows / 8][4]) {
  top[0] = top[1] = kNoExponent;
#pragma unroll
  for (int n = 0; n < kTileRows / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) top[i >> 1] = fmaxf(top[i >> 1], scores[n][i]);
  }
  top[0] = quad_max(top[0]);
  top[1] = quad_max(top[1]);
}

}  // namespace lln::cuda::sm90
