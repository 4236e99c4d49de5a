// The block-diagonal part: softmax of q k^T / sqrt(dim) between a tile of rows and the keys of
// their blocks, tile by tile, forward and backward.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/plain_call.cuh"

namespace lln::cuda::plain {

// First token of the block of a token that is not before the first block; of the first one it may
// lie before the sequence.
__device__ inline std::int64_t block_begin(const PlainCall& p, const DeviceSequence& sequence,
                                           std::int64_t token) {
  return token - (token - sequence.block_origin) % p.call.diag_block;
}

__device__ inline std::int64_t smaller(std::int64_t a, std::int64_t b) { return a < b ? a : b; }
__device__ inline std::int64_t larger(std::int64_t a, std::int64_t b) { return a > b ? a : b; }

// The keys that a row sees; some of them may not be valid. Of later rows neither end is earlier.
__device__ inline TokenSpan keys_of_row(const PlainCall& p, const DeviceSequence& sequence,
                                        std::int64_t row) {
  if (row < sequence.block_origin) return {0, 0};
  const std::int64_t begin = block_begin(p, sequence, row);
  const std::int64_t end = smaller(begin + p.call.diag_block, sequence.key_end);
  return {larger(begin, sequence.key_first), p.causal ? smaller(end, row + 1) : end};
}

// The first key that may be valid and in a block.
__device__ inline std::int64_t first_block_key(const DeviceSequence& sequence) {
  return larger(sequence.key_first, sequence.block_origin);
}

// The rows that see a key.
__device__ inline TokenSpan rows_of_key(const PlainCall& p, const DeviceSequence& sequence,
                                        std::int64_t key) {
  if (key < first_block_key(sequence) || key >= sequence.key_end) return {0, 0};
  const std::int64_t begin = block_begin(p, sequence, key);
  const std::int64_t end = smaller(begin + p.call.diag_block, sequence.q_tokens);
  return {p.causal ? key : larger(begin, 0), end};
}

// A span as part of the tile that begins at `tile`.
__device__ inline Span in_tile(const TokenSpan& span, std::int64_t tile, int size) {
  const auto cut = [&](std::int64_t token) {
    return static_cast<int>(larger(std::int64_t{0}, smaller(token - tile, size)));
  };
  return {cut(span.begin), cut(span.end)};
}

// All keys that any of these rows sees, and all rows that see any of these keys.
__device__ inline TokenSpan keys_of_rows(const PlainCall& p, const DeviceSequence& sequence,
                                         std::int64_t begin, std::int64_t end) {
  if (end <= sequence.block_origin) return {0, 0};
  return {keys_of_row(p, sequence, larger(begin, sequence.block_origin)).begin,
          keys_of_row(p, sequence, end - 1).end};
}

__device__ inline TokenSpan rows_of_keys(const PlainCall& p, const DeviceSequence& sequence,
                                         std::int64_t begin, std::int64_t end) {
  begin = larger(begin, first_block_key(sequence));
  end = smaller(end, sequence.key_end);
  if (begin >= end) return {0, 0};
  return {rows_of_key(p, sequence, begin).begin, rows_of_key(p, sequence, end - 1).end};
}

// tiles.seen of the rows from `begin` on.
template <class Block>
__device__ void find_seen(Block& block, const PlainCall& p, const Place& at, const Tiles& tiles,
                          std::int64_t begin, int rows) {
  for_each(block, rows, [&](int r) { tiles.seen[r] = keys_of_row(p, at.sequence, begin + r); });
}

// tiles.pairs = scores of the rows in tiles.x against the keys in tiles.k, in units of log2, -inf
// where a row does not see a key.
template <class Block>
__device__ void score_tile(Block& block, const PlainCall& p, const Place& at, const Tiles& tiles,
                           int rows, std::int64_t key_begin) {
  const Elements e{p, at};
  const float scale = 1 / sqrtf(static_cast<float>(p.dim));
  multiply<2, 2>(block, rows, p.tile, p.dim, {tiles.x, tiles.ld, 1}, {tiles.k, 1, tiles.ld},
                 WholeDepth{}, [&](int r, int j, float sum) {
                   const TokenSpan keys = tiles.seen[r];
                   const std::int64_t key = key_begin + j;
                   const bool sees = key >= keys.begin && key < keys.end && e.valid(key);
                   tiles.pairs[r * tiles.ld_p + j] =
                       sees ? clamp_exponent(scale * sum) * kLog2E : -kInfinity;
                 });
}

// tiles.dpairs = g v^T for the rows in tiles.w and the values in tiles.v.
template <class Block>
__device__ void value_products(Block& block, const PlainCall& p, const Tiles& tiles, int rows) {
  multiply<2, 2>(block, rows, p.tile, p.dim_v, {tiles.w, tiles.ld_v, 1}, {tiles.v, 1, tiles.ld_v},
                 WholeDepth{},
                 [&](int r, int j, float sum) { tiles.dpairs[r * tiles.ld_p + j] = sum; });
}

// Calls tile(first key) for the tiles of keys that `rows` rows see, with the queries in tiles.x,
// the keys and values loaded and their scores in tiles.pairs.
template <class Block, class Body>
__device__ void for_each_key_tile(Block& block, const PlainCall& p, const Place& at,
                                  const Tiles& tiles, std::int64_t begin, int rows, Body tile) {
  const TokenSpan keys = keys_of_rows(p, at.sequence, begin, begin + rows);
  find_seen(block, p, at, tiles, begin, rows);
  for (std::int64_t j = keys.begin; j < keys.end; j += p.tile) {
    load_keys<false>(block, p, at, tiles, j);
    score_tile(block, p, at, tiles, rows, j);
    tile(j);
  }
}

// out[rows, dim_v] = the average over the keys so far and those of a tile.
template <class Block>
__device__ void average_values(Block& block, const PlainCall& p, const Tiles& tiles, int rows,
                               std::int64_t key_begin, float* out) {
  const auto seen = [&](int r) { return in_tile(tiles.seen[r], key_begin, p.tile); };
  multiply_part(block, rows, p.dim_v, p.tile, {tiles.pairs, tiles.ld_p, 1},
                {tiles.v, tiles.ld_v, 1}, seen, [&](int r, int c, float sum) {
                  float& to = out[r * tiles.ld_v + c];
                  to = tiles.row.keep[r] * to + sum;
                });
}

template <class Block>
__device__ void reset_rows(Block& block, const Tiles& tiles, int rows) {
  for_each(block, rows, [&](int r) {
    tiles.row.reset(r);
    tiles.row.inverse[r] = 0;
    tiles.delta[r] = 0;
  });
}

// out[rows, dim_v] = the block-diagonal rows.
template <class Block>
__device__ void diag_rows(Block& block, const PlainCall& p, const Place& at, const Tiles& tiles,
                          std::int64_t begin, int rows, float* out) {
  clear(block, out, p.tile * tiles.ld_v);
  reset_rows(block, tiles, rows);
  load_queries<false>(block, p, at, tiles, begin, rows);
  for_each_key_tile(block, p, at, tiles, begin, rows, [&](std::int64_t j) {
    soften_rows(block, tiles.pairs, tiles.ld_p, rows, p.tile, tiles.row, tiles.scratch);
    average_values(block, p, tiles, rows, j, out);
  });
}

// tiles.pairs = P and tiles.dpairs = P (g v^T - delta) from scores and g v^T, 0 where a row does
// not see a key.
template <class Block>
__device__ void score_gradients(Block& block, const PlainCall& p, const Tiles& tiles, int rows) {
  for_each_element(block, rows, p.tile, [&](int r, int j) {
    float& score = tiles.pairs[r * tiles.ld_p + j];
    float& product = tiles.dpairs[r * tiles.ld_p + j];
    const bool sees = score != -kInfinity;
    score = sees ? exp2f(score - tiles.row.m[r]) * tiles.row.inverse[r] : 0.0F;
    product = sees ? score * (product - tiles.delta[r]) : 0.0F;
  });
}

// Adds dq of the block-diagonal part to tiles.y and leaves the statistics of the rows in p.diag;
// the rows themselves in tiles.z where the weights' gradients need them.
template <class Block>
__device__ void diag_row_gradients(Block& block, const PlainCall& p, const Place& at,
                                   const Tiles& tiles, std::int64_t begin, int rows) {
  if (p.wants_weights) clear(block, tiles.z, p.tile * tiles.ld_v);
  reset_rows(block, tiles, rows);
  load_queries<false>(block, p, at, tiles, begin, rows);
  load_g<true>(block, p, at, tiles, begin, rows);
  for_each_key_tile(block, p, at, tiles, begin, rows, [&](std::int64_t j) {
    soften_rows(block, tiles.pairs, tiles.ld_p, rows, p.tile, tiles.row, tiles.scratch);
    value_products(block, p, tiles, rows);
    sum_rows(
        block, rows, p.tile, tiles.scratch,
        [&](int r, int i) {
          const float weight = tiles.pairs[r * tiles.ld_p + i];
          return weight == 0 ? 0.0F : weight * tiles.dpairs[r * tiles.ld_p + i];
        },
        [&](int r, float sum) { tiles.delta[r] = tiles.row.keep[r] * tiles.delta[r] + sum; });
    if (p.wants_weights) average_values(block, p, tiles, rows, j, tiles.z);
  });
  const float scale = 1 / sqrtf(static_cast<float>(p.dim));
  for_each_key_tile(block, p, at, tiles, begin, rows, [&](std::int64_t j) {
    value_products(block, p, tiles, rows);
    score_gradients(block, p, tiles, rows);
    const auto seen = [&](int r) { return in_tile(tiles.seen[r], j, p.tile); };
    multiply_part(block, rows, p.dim, p.tile, {tiles.dpairs, tiles.ld_p, 1}, {tiles.k, tiles.ld, 1},
                  seen, [&](int r, int l, float sum) { tiles.y[r * tiles.ld + l] += scale * sum; });
  });
  for_each(block, rows, [&](int r) {
    const std::int64_t i = row_index(p, at, begin + r);
    p.diag.m[i] = tiles.row.m[r];
    p.diag.inverse[i] = tiles.row.inverse[r];
    p.diag.delta[i] = tiles.delta[r];
  });
}

// Adds dk and dv of the block-diagonal part to tiles.y and tiles.z, for the tile of keys from
// `begin` on.
template <class Block>
__device__ void diag_key_gradients(Block& block, const PlainCall& p, Place at, const Tiles& tiles,
                                   std::int64_t begin, std::int64_t end) {
  const TokenSpan all = rows_of_keys(p, at.sequence, begin, end);
  if (all.begin >= all.end) return;
  load_keys<false>(block, p, at, tiles, begin);
  const float scale = 1 / sqrtf(static_cast<float>(p.dim));
  for (int g = 0; g < p.group; ++g) {
    at.h = at.hk * p.group + g;
    for (std::int64_t i = all.begin; i < all.end; i += p.tile) {
      const int rows = static_cast<int>(smaller(all.end - i, p.tile));
      load_queries<false>(block, p, at, tiles, i, rows);
      load_g<true>(block, p, at, tiles, i, rows);
      for_each(block, rows, [&](int r) {
        const std::int64_t from = row_index(p, at, i + r);
        tiles.row.m[r] = p.diag.m[from];
        tiles.row.inverse[r] = p.diag.inverse[from];
        tiles.delta[r] = p.diag.delta[from];
      });
      find_seen(block, p, at, tiles, i, rows);
      score_tile(block, p, at, tiles, rows, begin);
      value_products(block, p, tiles, rows);
      score_gradients(block, p, tiles, rows);
      const auto seen = [&](int j) {
        return in_tile(rows_of_key(p, at.sequence, begin + j), i, rows);
      };
      multiply_part(block, p.tile, p.dim_v, rows, {tiles.pairs, 1, tiles.ld_p},
                    {tiles.w, tiles.ld_v, 1}, seen,
                    [&](int j, int c, float sum) { tiles.z[j * tiles.ld_v + c] += sum; });
      multiply_part(block, p.tile, p.dim, rows, {tiles.dpairs, 1, tiles.ld_p},
                    {tiles.x, tiles.ld, 1}, seen,
                    [&](int j, int l, float sum) { tiles.y[j * tiles.ld + l] += scale * sum; });
    }
  }
}

}  // namespace lln::cuda::plain
