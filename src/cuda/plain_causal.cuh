// The kernels of causal LLN. A block walks a piece of a sequence in tiles, with (m, s, C) of all
// keys before the tile; inside the tile every pair of a row and a key has its own exponentials,
//   P_ij = sum_l 2^(a_il + u_jl - M_i) / mass_i,     M_i over the keys that row i sees,
// which is exact however far the keys of a tile are apart, and no key reaches a row before it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/plain_rows.cuh"
#include "cuda/plain_states.cuh"

namespace lln::cuda::plain {

// Rows that are not before the first valid key, or all where keys elsewhere are given; only these
// see keys.
__device__ inline bool sees_keys(const PlainCall& p, const Place& at, std::int64_t row) {
  return p.state.given() || (at.has_keys() && row >= at.sequence.key_first);
}

// tiles.pairs = sum_l 2^(a + u - M) inverse for the keys not after a row, 0 elsewhere; a in
// tiles.x, u in tiles.k.
template <class Block>
__device__ void pair_weights(Block& block, const PlainCall& p, const Place& at, const Tiles& tiles,
                             std::int64_t begin, int rows, const float* inverse) {
  for_each_element(block, rows, p.tile, [&](int r, int j) {
    float sum = 0;
    if (j <= r && sees_keys(p, at, begin + r)) {
      const float* const a = tiles.x + r * tiles.ld;
      const float* const u = tiles.k + j * tiles.ld;
      for (int l = 0; l < p.dim; ++l) sum += exp2f(a[l] + u[l] - tiles.row.m[r]);
      if (inverse != nullptr) sum *= inverse[r];
    }
    tiles.pairs[r * tiles.ld_p + j] = sum;
  });
}

// The walk of a piece: the state before the current tile, m and s in tiles.channel, its log mass in
// tiles.c, averages in device memory.
struct Walk {
  const PlainCall& p;
  const Place& at;  // hk; h is the query head where one is worked on
  const Tiles& tiles;
  float* values;

  template <class Block>
  __device__ void begin(Block& block) const {
    const std::int64_t slot = at.job * p.call.heads_k + at.hk;
    for_each(block, p.dim, [&](int l) {
      tiles.channel.m[l] = p.before.m[slot * p.dim + l];
      tiles.channel.s[l] = p.before.s[slot * p.dim + l];
      tiles.c[l] = log_mass(tiles.channel.m[l], tiles.channel.s[l]);
    });
  }

  // Adds the keys of the tile to the state.
  template <class Block>
  __device__ void advance(Block& block, std::int64_t n) const {
    load_keys<true>(block, p, at, tiles, n);
    soften_columns(block, tiles.k, tiles.ld, p.tile, p.dim, tiles.channel);
    multiply<4, 4>(block, p.dim, p.dim_v, p.tile, {tiles.k, 1, tiles.ld}, {tiles.v, tiles.ld_v, 1},
                   WholeDepth{}, [&](int l, int c, float sum) {
                     float& to = values[l * p.dim_v + c];
                     to = tiles.channel.keep[l] * to + sum;
                   });
    for_each(block, p.dim,
             [&](int l) { tiles.c[l] = log_mass(tiles.channel.m[l], tiles.channel.s[l]); });
  }

  // The weights of `rows` rows of head `head.h`: of the state in tiles.x, of the keys of the tile
  // in tiles.pairs; they sum to one. Reference and 1 / mass in tiles.row. Uses tiles.y.
  template <class Block>
  __device__ void weigh(Block& block, const Place& head, std::int64_t n, int rows) const {
    const int ld = tiles.ld;
    load_keys<true>(block, p, head, tiles, n);
    load_queries<true>(block, p, head, tiles, n, rows);
    for_each(block, p.dim, [&](int l) {
      float top = tiles.c[l];
      for (int r = 0; r < rows; ++r) {
        const float u = tiles.k[r * ld + l];
        top = u > top || top != top ? u : top;
        tiles.y[r * ld + l] = top;
      }
    });
    max_rows(
        block, rows, p.dim, tiles.scratch,
        [&](int r, int l) { return tiles.x[r * ld + l] + tiles.y[r * ld + l]; },
        [&](int r, float most) { tiles.row.m[r] = most; });
    pair_weights(block, p, head, tiles, n, rows, nullptr);
    for_each_element(block, rows, p.dim, [&](int r, int l) {
      float& x = tiles.x[r * ld + l];
      const bool counts = sees_keys(p, head, n + r) && tiles.c[l] != -kInfinity;
      x = counts ? exp2f(x + tiles.c[l] - tiles.row.m[r]) : 0.0F;
    });
    sum_rows(
        block, rows, p.dim, tiles.scratch, [&](int r, int l) { return tiles.x[r * ld + l]; },
        [&](int r, float sum) { tiles.row.s[r] = sum; });
    sum_rows(
        block, rows, p.tile, tiles.scratch,
        [&](int r, int j) { return tiles.pairs[r * tiles.ld_p + j]; },
        [&](int r, float sum) { tiles.row.inverse[r] = inverse_or_zero(tiles.row.s[r] + sum); });
    for_each_element(block, rows, p.dim,
                     [&](int r, int l) { tiles.x[r * ld + l] *= tiles.row.inverse[r]; });
    for_each_element(block, rows, p.tile, [&](int r, int j) {
      tiles.pairs[r * tiles.ld_p + j] *= tiles.row.inverse[r];
    });
  }

  // add(row, channel, part of LLN) from the weights.
  template <class Block, class Add>
  __device__ void read(Block& block, int rows, Add add) const {
    multiply_state(block, rows, p.dim_v, p.dim, tiles.x, tiles.ld, {values, p.dim_v, 1},
                   tiles.stage, add);
    multiply_part(
        block, rows, p.dim_v, rows, {tiles.pairs, tiles.ld_p, 1}, {tiles.v, tiles.ld_v, 1},
        [](int r) {
          return Span{0, r + 1};
        },
        add);
  }
};

// o.
struct CausalRows {
  PlainCall p;
  static constexpr const char* kName = "cuda-plain causal rows";
  __host__ __device__ static unsigned tiles(const PlainCall&) {
    return kTileX | kTileK | kTileV | kTileY | kTileW;
  }

  template <class Block>
  __device__ void operator()(Block& block, std::int64_t index) const {
    const Place at = place_of<false>(p, index / p.call.heads_k, 0, index % p.call.heads_k);
    if (!at.exists) return;
    SharedMemory memory{block.shared()};
    const Tiles tiles(memory, p, CausalRows::tiles(p));
    const Walk walk{p, at, tiles, p.pieces.values + index * p.state_size()};
    walk.begin(block);
    for (std::int64_t n = at.begin; n < at.end; n += p.tile) {
      const int rows = rows_in_tile(p, n, at.end);
      for (int g = 0; g < p.group; ++g) {
        Place head = at;
        head.h = at.hk * p.group + g;
        const Elements e{p, head};
        if (p.has_diag()) {
          weighted_diag_rows(block, p, head, tiles, n, rows);
        } else {
          clear(block, tiles.w, p.tile * tiles.ld_v);
        }
        walk.weigh(block, head, n, rows);
        walk.read(block, rows, [&](int r, int c, float sum) {
          tiles.w[r * tiles.ld_v + c] += e.lln_weight(n + r, c) * sum;
        });
        store_rows(block, p, head, p.call.o, n, rows, tiles.w, tiles.ld_v, p.dim_v);
      }
      if (n + p.tile < at.end) walk.advance(block, n);
    }
  }
};

// dq, the statistics of rows, and c before every tile.
struct CausalRowGradients {
  PlainCall p;
  static constexpr const char* kName = "cuda-plain causal row gradients";
  __host__ __device__ static unsigned tiles(const PlainCall& p) {
    return kTileX | kTileK | kTileV | kTileY | kTileW | (p.wants_weights ? kTileZ : 0U);
  }

  template <class Block>
  __device__ void operator()(Block& block, std::int64_t index) const {
    const std::int64_t job = index / p.call.heads_k, hk = index % p.call.heads_k;
    const Place at = place_of<false>(p, job, 0, hk);
    SharedMemory memory{block.shared()};
    const Tiles tiles(memory, p, CausalRowGradients::tiles(p));
    const Walk walk{p, at, tiles, p.pieces.values + index * p.state_size()};
    // One query head after the other would walk the state again for each: sums of a head are kept
    // in its slot, tile by tile.
    for (int g = 0; g < p.group; ++g) {
      reset_sums(block, p, tiles);
      write_row_sums(block, p, tiles, job * p.call.heads + hk * p.group + g);
    }
    if (!at.exists) return;
    walk.begin(block);
    for (std::int64_t n = at.begin; n < at.end; n += p.tile) {
      float* const c = p.chunk_c + chunk_index(p, at.sequence, job, at.begin, n, hk);
      for_each(block, p.dim, [&](int l) { c[l] = tiles.c[l]; });
      for (int g = 0; g < p.group; ++g) rows_of_head(block, walk, hk * p.group + g, n);
      if (n + p.tile < at.end) walk.advance(block, n);
    }
  }

 private:
  template <class Block>
  __device__ void rows_of_head(Block& block, const Walk& walk, std::int64_t h,
                               std::int64_t n) const {
    const Tiles& tiles = walk.tiles;
    Place head = walk.at;
    head.h = h;
    const int rows = rows_in_tile(p, n, head.end);
    const int ld = tiles.ld, ld_p = tiles.ld_p;
    reset_sums(block, p, tiles);
    walk.weigh(block, head, n, rows);
    load_g<false>(block, p, head, tiles, n, rows);
    clear(block, tiles.y, p.tile * ld);
    multiply_state(block, rows, p.dim, p.dim_v, tiles.w, tiles.ld_v, {walk.values, 1, p.dim_v},
                   tiles.stage, [&](int r, int l, float sum) { tiles.y[r * ld + l] += sum; });
    value_products(block, p, tiles, rows);
    sum_rows(
        block, rows, p.dim, tiles.scratch,
        [&](int r, int l) { return tiles.x[r * ld + l] * tiles.y[r * ld + l]; },
        [&](int r, float sum) { tiles.delta[r] = sum; });
    sum_rows(
        block, rows, rows, tiles.scratch,
        [&](int r, int j) {
          return j > r ? 0.0F : tiles.pairs[r * ld_p + j] * tiles.dpairs[r * ld_p + j];
        },
        [&](int r, float sum) { tiles.delta[r] += sum; });
    if (p.wants_weights) {
      clear(block, tiles.z, p.tile * tiles.ld_v);
      walk.read(block, rows, [&](int r, int c, float sum) { tiles.z[r * tiles.ld_v + c] += sum; });
      note_part(block, p, head, tiles, n, rows, tiles.lln_sums, tiles.dots);
    }
    through_queries(block, p, head, tiles, n, rows, [&](int r, int l, float a) {
      if (!sees_keys(p, head, n + r)) return 0.0F;
      float own = 0;
      for (int j = 0; j <= r; ++j) {
        own += (tiles.dpairs[r * ld_p + j] - tiles.delta[r]) *
               exp2f(a + tiles.k[j * ld + l] - tiles.row.m[r]);
      }
      return tiles.x[r * ld + l] * (tiles.y[r * ld + l] - tiles.delta[r]) +
             own * tiles.row.inverse[r];
    });
    write_lln_statistics(block, p, head, tiles, n, rows);
    finish_row_gradients(block, p, head, tiles, n, rows);
    add_row_sums(block, tiles, walk.at.job * p.call.heads + h);
  }

  // Adds the sums of a tile to those of the head.
  template <class Block>
  __device__ void add_row_sums(Block& block, const Tiles& tiles, std::int64_t slot) const {
    float* const to = p.weight_sums + slot * 2 * (p.dim_v + 1);
    block.run([&](int t) {
      if (t != 0) return;
      for (int r = 0; r < p.tile; ++r) p.alpha_sums[slot] += tiles.sums[r];
      for (int c = 0; c < p.dim_v; ++c) {
        to[p.dim_v] += tiles.lln_sums[c];
        to[2 * p.dim_v + 1] += tiles.diag_sums[c];
      }
    });
    for_each(block, p.dim_v, [&](int c) {
      to[c] += tiles.lln_sums[c];
      to[p.dim_v + 1 + c] += tiles.diag_sums[c];
    });
  }
};

// dk and dv: tiles are walked from the last to the first with [G, T], what the rows behind the tile
// send to the keys up to it, relative to c after the tile.
struct CausalKeyGradients {
  PlainCall p;
  static constexpr const char* kName = "cuda-plain causal key gradients";
  __host__ __device__ static unsigned tiles(const PlainCall&) {
    return kTileX | kTileK | kTileV | kTileY | kTileW | kTileZ;
  }

  template <class Block>
  __device__ void operator()(Block& block, std::int64_t index) const {
    const std::int64_t job = index / p.call.heads_k, hk = index % p.call.heads_k;
    const Place at = place_of<true>(p, job, 0, hk);
    SharedMemory memory{block.shared()};
    const Tiles tiles(memory, p, CausalKeyGradients::tiles(p));
    reset_sums(block, p, tiles);
    if (at.exists) walk_back(block, at, tiles, index);
    write_key_sum(block, p, tiles, index);
  }

 private:
  template <class Block>
  __device__ void walk_back(Block& block, const Place& at, const Tiles& tiles,
                            std::int64_t slot) const {
    float* const c1 = tiles.channel.m;
    float* const decay = tiles.channel.keep;
    float* const values = p.row_pieces.values + slot * p.state_size();
    const bool last_piece = at.end == at.sequence.k_tokens;
    // c after the piece, where anything behind it counts.
    const float* after = nullptr;
    if (!last_piece) {
      after = p.chunk_c + chunk_index(p, at.sequence, at.job + 1, at.end, at.end, at.hk);
    } else if (p.dsaved.given()) {
      after = p.total.m + (at.s * p.call.heads_k + at.hk) * p.dim;
    }
    for_each(block, p.dim, [&](int l) { tiles.t[l] = p.row_pieces.s[slot * p.dim + l]; });
    const std::int64_t count = (at.end - at.begin + p.tile - 1) / p.tile;
    for (std::int64_t i = count - 1; i >= 0; --i) {
      const std::int64_t n = at.begin + i * p.tile;
      const int keys = rows_in_tile(p, n, at.end);
      const float* const before =
          p.chunk_c + chunk_index(p, at.sequence, at.job, at.begin, n, at.hk);
      for_each(block, p.dim, [&](int l) {
        tiles.c[l] = before[l];
        c1[l] = after == nullptr ? 0.0F : after[l];
        decay[l] = after == nullptr || before[l] == -kInfinity ? 0.0F : exp2f(before[l] - c1[l]);
      });
      clear(block, tiles.y, p.tile * tiles.ld);
      clear(block, tiles.z, p.tile * tiles.ld_v);
      load_keys<true>(block, p, at, tiles, n);
      if (after != nullptr) from_later_rows(block, tiles, c1, values, keys);
      for (int g = 0; g < p.group; ++g) {
        Place head = at;
        head.h = at.hk * p.group + g;
        from_own_rows(block, head, tiles, n, keys);
        if (i > 0) add_to_later(block, tiles, values, keys, g == 0);
      }
      through_keys(block, p, at, tiles, n, keys);
      if (p.has_diag()) diag_key_gradients(block, p, at, tiles, n, n + keys);
      store_keys(block, p, at, tiles, n, keys);
      after = before;
    }
  }

  // dv = E G and du = E (v G^T - T), E = 2^(u - c1).
  template <class Block>
  __device__ void from_later_rows(Block& block, const Tiles& tiles, const float* c1,
                                  const float* values, int keys) const {
    const int ld = tiles.ld;
    for_each_element(block, keys, p.dim, [&](int r, int l) {
      const float u = tiles.k[r * ld + l];
      tiles.x[r * ld + l] = u == -kInfinity ? 0.0F : exp2f(u - c1[l]);
    });
    multiply_state(block, keys, p.dim_v, p.dim, tiles.x, ld, {values, p.dim_v, 1}, tiles.stage,
                   [&](int r, int c, float sum) { tiles.z[r * tiles.ld_v + c] += sum; });
    multiply_state(block, keys, p.dim, p.dim_v, tiles.v, tiles.ld_v, {values, 1, p.dim_v},
                   tiles.stage, [&](int r, int l, float sum) { tiles.y[r * ld + l] += sum; });
    for_each_element(block, keys, p.dim, [&](int r, int l) {
      float& y = tiles.y[r * ld + l];
      y = tiles.x[r * ld + l] * (y - tiles.t[l]);
    });
  }

  // What the rows of the tile send to its keys; leaves their exponents in tiles.x, g in tiles.w.
  template <class Block>
  __device__ void from_own_rows(Block& block, const Place& head, const Tiles& tiles, std::int64_t n,
                                int rows) const {
    const int ld = tiles.ld, ld_p = tiles.ld_p;
    load_queries<true>(block, p, head, tiles, n, rows);
    load_g<false>(block, p, head, tiles, n, rows);
    for_each(block, rows, [&](int r) {
      const std::int64_t i = row_index(p, head, n + r);
      tiles.row.m[r] = p.lln.m[i];
      tiles.row.inverse[r] = p.lln.inverse[i];
      tiles.delta[r] = p.lln.delta[i];
    });
    pair_weights(block, p, head, tiles, n, rows, tiles.row.inverse);
    value_products(block, p, tiles, rows);
    const auto later = [rows](int j) { return Span{j, rows}; };
    multiply_part(block, rows, p.dim_v, rows, {tiles.pairs, 1, ld_p}, {tiles.w, tiles.ld_v, 1},
                  later, [&](int j, int c, float sum) { tiles.z[j * tiles.ld_v + c] += sum; });
    for_each_element(block, rows, p.dim, [&](int j, int l) {
      const float u = tiles.k[j * ld + l];
      float sum = 0;
      for (int r = j; r < rows; ++r) {
        sum += (tiles.dpairs[r * ld_p + j] - tiles.delta[r]) *
               (exp2f(tiles.x[r * ld + l] + u - tiles.row.m[r]) * tiles.row.inverse[r]);
      }
      tiles.y[j * ld + l] += sum;
    });
  }

  // [G, T] relative to c before the tile, with the rows of the tile: the first head of a group also
  // brings what is there to the new reference.
  template <class Block>
  __device__ void add_to_later(Block& block, const Tiles& tiles, float* values, int rows,
                               bool first) const {
    const int ld = tiles.ld;
    const float* const decay = tiles.channel.keep;
    for_each_element(block, rows, p.dim, [&](int r, int l) {
      float& x = tiles.x[r * ld + l];
      const bool counts = tiles.row.inverse[r] != 0 && tiles.c[l] != -kInfinity;
      x = counts ? exp2f(x + tiles.c[l] - tiles.row.m[r]) * tiles.row.inverse[r] : 0.0F;
    });
    for_each(block, p.dim, [&](int l) {
      float sum = first ? decay[l] * tiles.t[l] : tiles.t[l];
      for (int r = 0; r < rows; ++r) sum += tiles.x[r * ld + l] * tiles.delta[r];
      tiles.t[l] = sum;
    });
    multiply<4, 4>(block, p.dim, p.dim_v, rows, {tiles.x, 1, ld}, {tiles.w, tiles.ld_v, 1},
                   WholeDepth{}, [&](int l, int c, float sum) {
                     float& to = values[l * p.dim_v + c];
                     to = (first ? decay[l] * to : to) + sum;
                   });
  }
};

}  // namespace lln::cuda::plain
