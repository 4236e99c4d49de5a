// Which keys the rows of a block of threads see in Diag, tile by tile. Tiles of rows begin at
// multiples of 64 tokens from the first valid key, from which the blocks of Diag are counted too: a
// tile of rows then meets one tile of keys where the block is 64.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/tiled_keys.cuh"
#include "cuda/tiled_rows.cuh"

namespace lln::cuda {

inline constexpr int kDiagTile = 64;  // rows, and keys
inline constexpr int kDiagThreads = 128;

// Rows of one query head, and what is known of their keys. Tokens are counted from the first row.
struct DiagPiece {
  RowPiece rows;
  int block;        // tokens of a block of Diag
  int block_begin;  // of the block of row `seeing`
  int seeing;       // rows before it come before all valid keys
  int key_end;      // valid keys come before it; at most a block past the rows
  int lead;         // rows that the first tile lacks at its beginning
  int tiles;

  __device__ int tile_begin(int tile) const { return max(0, tile * kDiagTile - lead); }
  __device__ int tile_end(int tile) const { return min(rows.count, (tile + 1) * kDiagTile - lead); }
  // First token of the block of a row.
  __device__ int block_of(int row) const {
    return row - static_cast<int>(static_cast<unsigned>(row - block_begin) %
                                  static_cast<unsigned>(block));
  }
};

// One block per row job and query head. rows.s is -1 where there is no such job.
__device__ inline DiagPiece find_diag_rows(const DeviceCall& call) {
  DiagPiece piece;
  piece.rows = find_rows(call);
  const DeviceSequence& seq = piece.rows.sequence;
  // Borders between pieces move up to the next border of a tile.
  const int shift = static_cast<int>(seq.key_first % kDiagTile);
  const bool first = piece.rows.begin == 0;
  const bool last = piece.rows.begin + piece.rows.count >= seq.q_tokens;
  const std::int64_t end =
      last ? seq.q_tokens : min(piece.rows.begin + piece.rows.count + shift, seq.q_tokens);
  if (!first) piece.rows.begin = min(piece.rows.begin + shift, seq.q_tokens);
  const std::int64_t begin = piece.rows.begin;
  piece.rows.count = static_cast<int>(end - begin);
  piece.lead = first && shift > 0 ? kDiagTile - shift : 0;
  piece.tiles = (piece.rows.count + piece.lead + kDiagTile - 1) / kDiagTile;
  piece.block = static_cast<int>(call.diag_block);
  const std::int64_t before = max(std::int64_t{0}, begin - seq.key_first);
  piece.seeing = static_cast<int>(
      min(max(std::int64_t{0}, seq.key_first - begin), std::int64_t{piece.rows.count}));
  const auto inside = before <= 0xFFFFFFFFLL
                          ? static_cast<int>(static_cast<std::uint32_t>(before) %
                                             static_cast<std::uint32_t>(piece.block))
                          : static_cast<int>(before % piece.block);
  piece.block_begin = piece.seeing - inside;
  piece.key_end =
      static_cast<int>(max(std::int64_t{piece.block_begin},
                           min(seq.key_end - begin, std::int64_t{piece.rows.count} + piece.block)));
  return piece;
}

// A tile of keys that a tile of rows is taken against. Every tile of rows has at least one step,
// whose keys may be none.
struct DiagStep {
  int tile = 0;
  int key_begin = 0, key_end = 0;  // of the whole tile of rows
  int key = 0;                     // the first of this step
  int sweep = 0;

  __device__ bool opens() const { return key == key_begin && sweep == 0; }
  __device__ bool has_keys() const { return key < key_end; }
  __device__ bool last_keys() const { return key + kDiagTile >= key_end; }

  __device__ void open(const DiagPiece& piece) {
    key_begin = key_end = key = 0;
    const int begin = piece.tile_begin(tile), end = piece.tile_end(tile);
    if (tile >= piece.tiles || end <= piece.seeing) return;
    key = key_begin = piece.block_of(begin);
    const int stop = piece.block % kDiagTile == 0 ? key_begin : piece.block_of(end - 1);
    key_end = min(stop + piece.block, piece.key_end);
  }
  // Goes over the keys of a tile of rows `sweeps` times where they are more than one tile.
  __device__ void next(const DiagPiece& piece, int sweeps) {
    if (!last_keys()) {
      key += kDiagTile;
    } else if (sweep + 1 < sweeps && key != key_begin) {
      ++sweep;
      key = key_begin;
    } else {
      ++tile;
      sweep = 0;
      open(piece);
    }
  }
};

__device__ inline std::uint64_t low_bits(int count) {
  return count >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << max(count, 0)) - 1;
}

// Bit j: whether key step.key + j of a step counts.
__device__ inline std::uint64_t step_keys(const Sequences& all, const DiagPiece& piece,
                                          const DiagStep& step) {
  if (all.mask == nullptr) return low_bits(step.key_end - step.key);
  return valid_keys(all, piece.rows.sequence, piece.rows.begin + step.key,
                    piece.rows.begin + step.key_end);
}

// Bit j: whether a row sees key step.key + j, given those that count.
__device__ inline std::uint64_t seen_keys(const DiagPiece& piece, const DiagStep& step, int row,
                                          std::uint64_t valid) {
  if (piece.block % kDiagTile == 0) return valid;
  const int begin = piece.block_of(row) - step.key;
  return valid & low_bits(begin + piece.block) & ~low_bits(begin);
}

// Starts copying the keys and values of a step into two tiles.
template <class T, int kDim>
struct DiagKeys {
  static constexpr int kTileBytes = kDiagTile * kDim * 2;

  const T *k, *v;  // of the first row
  std::int64_t k_stride, v_stride;
  int dim, dim_v;

  __device__ DiagKeys(const DeviceCall& call, const RowPiece& rows)
      : k(first(call.k, rows)),
        v(first(call.v, rows)),
        k_stride(call.k.token),
        v_stride(call.v.token),
        dim(static_cast<int>(call.dim)),
        dim_v(static_cast<int>(call.dim_v)) {}

  __device__ void start(const Sequences& all, const DiagPiece& piece, const DiagStep& step,
                        unsigned char* k_tile, unsigned char* v_tile) const {
    if (!step.has_keys()) return;
    if (all.mask == nullptr && step.key + kDiagTile <= step.key_end && dim == kDim &&
        dim_v == kDim) {
      copy_whole_tile<kDiagTile, kDim, kDiagThreads>(k_tile, k, k_stride, step.key);
      copy_whole_tile<kDiagTile, kDim, kDiagThreads>(v_tile, v, v_stride, step.key);
      return;
    }
    const auto valid = [&](int key) {
      return key < step.key_end &&
             (all.mask == nullptr || key_valid(all, piece.rows.sequence, piece.rows.begin + key));
    };
    copy_tile<kDiagTile, kDim, kDiagThreads>(k_tile, k, k_stride, step.key, dim, valid);
    copy_tile<kDiagTile, kDim, kDiagThreads>(v_tile, v, v_stride, step.key, dim_v, valid);
  }

 private:
  __device__ static const T* first(const Rows& tensor, const RowPiece& rows) {
    return static_cast<const T*>(tensor.data) + rows.sequence.batch * tensor.batch +
           rows.head_k * tensor.head + (rows.sequence.k_begin + rows.begin) * tensor.token;
  }
};

// Scores of 16 rows against a tile of keys become -inf where a row does not see a key; rows
// lane / 4 and + 8 see the bits of `seen`.
__device__ inline void mask_scores(float (&scores)[kDiagTile / 8][4],
                                   const std::uint64_t (&seen)[2]) {
  const bool all = seen[0] == ~std::uint64_t{0} && seen[1] == ~std::uint64_t{0};
  if (__all_sync(0xFFFFFFFFU, all)) return;
  const int t = threadIdx.x & 3;
  const std::uint64_t own[2] = {seen[0] >> (2 * t), seen[1] >> (2 * t)};
#pragma unroll
  for (int n = 0; n < kDiagTile / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (((own[i >> 1] >> (8 * n + (i & 1))) & 1) == 0) scores[n][i] = -INFINITY;
    }
  }
}

}  // namespace lln::cuda
