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

// Which tokens of its block one sees: causal rows those up to themselves, and their keys are seen
// by the rows from them on. Kernels with LLN know that it is `all` when they are compiled.
enum class DiagSight : std::uint8_t { all, up_to, from };

// Rows of one query head, and what is known of their keys. Tokens are counted from the first row.
struct DiagPiece {
  RowPiece rows;
  DiagSight sight;
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

// Cuts `rows`, which are tokens begin .. + count of `tokens`, into tiles; they see tokens of the
// same sequence from its first valid key up to `seen_end`.
__device__ inline DiagPiece cut_piece(const DeviceCall& call, const RowPiece& rows,
                                      std::int64_t tokens, std::int64_t seen_end, DiagSight sight) {
  DiagPiece piece;
  piece.rows = rows;
  piece.sight = sight;
  // Borders between pieces move up to the next border of a tile.
  const std::int64_t key_first = rows.sequence.key_first;
  const int shift = static_cast<int>(key_first % kDiagTile);
  const bool last = rows.begin + rows.count >= tokens;
  const std::int64_t end = last ? tokens : min(rows.begin + rows.count + shift, tokens);
  const std::int64_t begin = rows.begin == 0 ? 0 : min(rows.begin + shift, tokens);
  piece.rows.begin = begin;
  const int count = static_cast<int>(end - begin);
  piece.rows.count = count;
  piece.lead = begin == 0 && shift > 0 ? kDiagTile - shift : 0;
  piece.tiles = (count + piece.lead + kDiagTile - 1) / kDiagTile;
  piece.block = static_cast<int>(call.diag_block);
  piece.seeing =
      static_cast<int>(min(max(std::int64_t{0}, key_first - begin), std::int64_t{count}));
  const std::int64_t before = max(std::int64_t{0}, begin - key_first);
  const std::int64_t inside = before <= 0xFFFFFFFFLL ? static_cast<std::uint32_t>(before) %
                                                           static_cast<std::uint32_t>(piece.block)
                                                     : before % piece.block;
  piece.block_begin = piece.seeing - static_cast<int>(inside);
  piece.key_end = static_cast<int>(max(std::int64_t{piece.block_begin},
                                       min(seen_end - begin, std::int64_t{count} + piece.block)));
  return piece;
}

// Passes over rows come after one over keys and go the other way: the keys that it read last are
// still in the cache.
__device__ inline std::uint32_t backwards() { return gridDim.x - 1 - blockIdx.x; }

// One block per row job and query head. rows.s is -1 where there is no such job.
template <bool kLln>
__device__ inline DiagPiece find_diag_rows(const TiledCall& tiled) {
  const RowPiece rows = find_rows(tiled.call, backwards());
  return cut_piece(tiled.call, rows, rows.sequence.q_tokens, rows.sequence.key_end,
                   !kLln && tiled.causal ? DiagSight::up_to : DiagSight::all);
}

// A tile of keys that a tile of rows is taken against. Every tile of rows has at least one step,
// whose keys may be none. Where not kSeveral the block divides a tile: a tile of rows then sees the
// keys beside it and no others.
template <bool kSeveral>
struct DiagStep {
  int tile = 0;
  int key_begin = 0, key_end = 0;  // of the whole tile of rows
  int key = 0;                     // the first of this step
  int sweep = 0;

  __device__ bool opens() const { return (!kSeveral || key == key_begin) && sweep == 0; }
  __device__ bool has_keys() const { return key < key_end; }
  __device__ bool last_keys() const { return !kSeveral || key + kDiagTile >= key_end; }
  __device__ bool several() const { return kSeveral && key_begin + kDiagTile < key_end; }

  __device__ void open(const DiagPiece& piece) {
    key_begin = key_end = key = 0;
    const int begin = piece.tile_begin(tile), end = piece.tile_end(tile);
    if (tile >= piece.tiles || end <= piece.seeing) return;
    if constexpr (!kSeveral) {
      key = key_begin = begin;
      key_end = min(begin + kDiagTile, piece.key_end);
      return;
    }
    key = key_begin = piece.block_of(begin);
    const int stop = piece.block % kDiagTile == 0 ? key_begin : piece.block_of(end - 1);
    key_end = min(stop + piece.block, piece.key_end);
    // What no token of the tile sees is not visited.
    if (piece.sight == DiagSight::up_to) key_end = min(key_end, end);
    if (piece.sight == DiagSight::from) key = key_begin = begin;
  }
  // Goes over the keys of a tile of rows `sweeps` times.
  __device__ void next(const DiagPiece& piece, int sweeps) {
    if (!last_keys()) {
      key += kDiagTile;
    } else if (sweep + 1 < sweeps) {
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
template <class Step>
__device__ inline std::uint64_t step_keys(const Sequences& all, const DiagPiece& piece,
                                          const Step& step) {
  if (all.mask == nullptr) return low_bits(step.key_end - step.key);
  return valid_keys(all, piece.rows.sequence, piece.rows.begin + step.key,
                    piece.rows.begin + step.key_end);
}

// Bit j: whether a row sees key step.key + j, given those that count.
template <class Step>
__device__ inline std::uint64_t seen_keys(const DiagPiece& piece, const Step& step, int row,
                                          std::uint64_t valid) {
  if (piece.sight == DiagSight::up_to) valid &= low_bits(row + 1 - step.key);
  if (piece.sight == DiagSight::from) valid &= ~low_bits(row - step.key);
  if (piece.block % kDiagTile == 0) return valid;
  const int begin = piece.block_of(row) - step.key;
  return valid & low_bits(begin + piece.block) & ~low_bits(begin);
}

// Two tensors whose tiles are copied together: k and v, or q and g.
template <class T, int kDim, int kThreads>
struct TilePair {
  static constexpr int kTileBytes = kDiagTile * kDim * 2;

  const T *x, *y;
  std::int64_t x_stride, y_stride;
  int x_dim, y_dim;

  // Tokens first .. + 63 before `end`; where masked, those that valid(token) names.
  template <class Valid>
  __device__ void start(unsigned char* tiles, int first, int end, bool masked,
                        Valid&& valid) const {
    if (!masked && first + kDiagTile <= end && x_dim == kDim && y_dim == kDim) {
      copy_whole_tile<kDiagTile, kDim, kThreads>(tiles, x, x_stride, first);
      copy_whole_tile<kDiagTile, kDim, kThreads>(tiles + kTileBytes, y, y_stride, first);
      return;
    }
    const auto there = [&](int token) { return token < end && (!masked || valid(token)); };
    copy_tile<kDiagTile, kDim, kThreads>(tiles, x, x_stride, first, x_dim, there);
    copy_tile<kDiagTile, kDim, kThreads>(tiles + kTileBytes, y, y_stride, first, y_dim, there);
  }
};

// k and v of a piece of rows.
template <class T, int kDim, int kThreads>
__device__ inline TilePair<T, kDim, kThreads> keys_of(const DeviceCall& call,
                                                      const RowPiece& rows) {
  const auto first = [&](const Rows& tensor) {
    return static_cast<const T*>(tensor.data) + rows.sequence.batch * tensor.batch +
           rows.head_k * tensor.head + (rows.sequence.k_begin + rows.begin) * tensor.token;
  };
  return {first(call.k),
          first(call.v),
          call.k.token,
          call.v.token,
          static_cast<int>(call.dim),
          static_cast<int>(call.dim_v)};
}

// Starts copying the keys of a step; keys that do not count become zeros.
template <class T, int kDim, int kThreads, class Step>
__device__ inline void start_keys(const TilePair<T, kDim, kThreads>& keys, const Sequences& all,
                                  const DiagPiece& piece, const Step& step, unsigned char* tiles) {
  if (!step.has_keys()) return;
  keys.start(tiles, step.key, step.key_end, all.mask != nullptr,
             [&](int key) { return key_valid(all, piece.rows.sequence, piece.rows.begin + key); });
}

// Scores of 16 rows against 8 * kCount keys become -inf where a row does not see a key; rows
// lane / 4 and + 8 see the bits of `seen`.
template <int kCount>
__device__ inline void mask_scores(float (&scores)[kCount][4], const std::uint64_t (&seen)[2]) {
  const bool all = seen[0] == ~std::uint64_t{0} && seen[1] == ~std::uint64_t{0};
  if (__all_sync(0xFFFFFFFFU, all)) return;
  const int t = threadIdx.x & 3;
  const std::uint64_t own[2] = {seen[0] >> (2 * t), seen[1] >> (2 * t)};
#pragma unroll
  for (int n = 0; n < kCount; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (((own[i >> 1] >> (8 * n + (i & 1))) & 1) == 0) scores[n][i] = -INFINITY;
    }
  }
}

}  // namespace lln::cuda
