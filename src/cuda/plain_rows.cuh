// The kernels over rows and over keys of everything but causal LLN: rows read the state of all keys
// and leave o or dq, keys read what the rows left and give dk and dv. Each takes the block-diagonal
// part along.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "cuda/plain_diag.cuh"

namespace lln::cuda::plain {

__device__ inline int rows_in_tile(const PlainCall& p, std::int64_t begin, std::int64_t end) {
  return static_cast<int>(end - begin < p.tile ? end - begin : p.tile);
}

template <class Block>
__device__ void store_rows(Block& block, const PlainCall& p, const Place& at, const Rows& to,
                           std::int64_t begin, int rows, const float* tile, int ld, int width) {
  const Elements e{p, at};
  for_each_element(block, rows, width,
                   [&](int r, int c) { e.store_row(to, begin + r, c, tile[r * ld + c]); });
}

// Stores dk and dv from tiles.y and tiles.z; keys that are not valid have none.
template <class Block>
__device__ void store_keys(Block& block, const PlainCall& p, const Place& at, const Tiles& tiles,
                           std::int64_t begin, int keys) {
  const Elements e{p, at};
  for_each_element(block, keys, p.dim, [&](int r, int l) {
    const float x = e.valid(begin + r) ? tiles.y[r * tiles.ld + l] : 0.0F;
    e.store_key(p.call.dk, begin + r, l, x);
  });
  for_each_element(block, keys, p.dim_v, [&](int r, int c) {
    const float x = e.valid(begin + r) ? tiles.z[r * tiles.ld_v + c] : 0.0F;
    e.store_key(p.call.dv, begin + r, c, x);
  });
}

// Whether there are keys, here or elsewhere, for the rows of a sequence.
__device__ inline bool sees_lln(const PlainCall& p, const Place& at) {
  return p.state.given() || at.has_keys();
}

// The block-diagonal rows times their weight in tiles.w.
template <class Block>
__device__ void weighted_diag_rows(Block& block, const PlainCall& p, const Place& at,
                                   const Tiles& tiles, std::int64_t begin, int rows) {
  diag_rows(block, p, at, tiles, begin, rows, tiles.w);
  const Elements e{p, at};
  for_each_element(block, rows, p.dim_v, [&](int r, int c) {
    tiles.w[r * tiles.ld_v + c] *= e.diag_weight(begin + r, c);
  });
}

// tiles.x = W of the rows: the softmax over channels of a + c. Reference and 1 / mass in tiles.row.
template <class Block>
__device__ void channel_weights(Block& block, const PlainCall& p, const Place& at,
                                const Tiles& tiles, std::int64_t begin, int rows) {
  const float* const c = p.total.m + (at.s * p.call.heads_k + at.hk) * p.dim;
  reset_rows(block, tiles, rows);
  load_queries<true>(block, p, at, tiles, begin, rows);
  for_each_element(block, rows, p.dim, [&](int r, int l) { tiles.x[r * tiles.ld + l] += c[l]; });
  soften_rows(block, tiles.x, tiles.ld, rows, p.dim, tiles.row, tiles.scratch);
}

// o.
struct ForwardRows {
  PlainCall p;
  static constexpr const char* kName = "cuda-plain rows";
  __host__ __device__ static unsigned tiles(const PlainCall& p) {
    return kTileX | kTileW | (p.has_diag() ? kTileK | kTileV : 0U);
  }

  template <class Block>
  __device__ void operator()(Block& block, std::int64_t index) const {
    const Place at = part_place<false>(p, index);
    if (!at.exists) return;
    SharedMemory memory{block.shared()};
    const Tiles tiles(memory, p, ForwardRows::tiles(p));
    const Elements e{p, at};
    const float* const values = p.total.values + (at.s * p.call.heads_k + at.hk) * p.state_size();
    for (std::int64_t n = at.begin; n < at.end; n += p.tile) {
      const int rows = rows_in_tile(p, n, at.end);
      if (p.has_diag()) {
        weighted_diag_rows(block, p, at, tiles, n, rows);
      } else {
        clear(block, tiles.w, p.tile * tiles.ld_v);
      }
      if (p.has_lln() && sees_lln(p, at)) {
        channel_weights(block, p, at, tiles, n, rows);
        multiply_state(block, rows, p.dim_v, p.dim, tiles.x, tiles.ld, {values, p.dim_v, 1},
                       tiles.stage, [&](int r, int c, float sum) {
                         tiles.w[r * tiles.ld_v + c] += e.lln_weight(n + r, c) * sum;
                       });
      }
      store_rows(block, p, at, p.call.o, n, rows, tiles.w, tiles.ld_v, p.dim_v);
    }
  }
};

// Sums for the gradients of weights: tiles.z holds the rows of one part.
template <class Block>
__device__ void note_part(Block& block, const PlainCall& p, const Place& at, const Tiles& tiles,
                          std::int64_t begin, int rows, float* sums, float* dots) {
  const Elements e{p, at};
  for_each(block, p.dim_v, [&](int c) {
    float sum = 0;
    for (int r = 0; r < rows; ++r) sum += e.g(begin + r, c) * tiles.z[r * tiles.ld_v + c];
    sums[c] += sum;
  });
  sum_rows(
      block, rows, p.dim_v, tiles.scratch,
      [&](int r, int c) { return e.g(begin + r, c) * tiles.z[r * tiles.ld_v + c]; },
      [&](int r, float sum) { dots[r] = sum; });
}

// Before the first tile of a block of rows or keys.
template <class Block>
__device__ void reset_sums(Block& block, const PlainCall& p, const Tiles& tiles) {
  for_each(block, p.dim_v + 1, [&](int c) { tiles.lln_sums[c] = tiles.diag_sums[c] = 0; });
  for_each(block, p.tile, [&](int r) { tiles.sums[r] = tiles.dots[r] = tiles.diag_dots[r] = 0; });
}

// After the last tile: what block `index` adds to the parameters' gradients.
template <class Block>
__device__ void write_row_sums(Block& block, const PlainCall& p, const Tiles& tiles,
                               std::int64_t index) {
  block.run([&](int t) {
    if (t != 0) return;
    float alpha = 0;
    for (int r = 0; r < p.tile; ++r) alpha += tiles.sums[r];
    p.alpha_sums[index] = alpha;
    for (int c = 0; c < p.dim_v; ++c) {
      tiles.lln_sums[p.dim_v] += tiles.lln_sums[c];
      tiles.diag_sums[p.dim_v] += tiles.diag_sums[c];
    }
  });
  float* const to = p.weight_sums + index * 2 * (p.dim_v + 1);
  for_each(block, p.dim_v + 1, [&](int c) {
    to[c] = tiles.lln_sums[c];
    to[p.dim_v + 1 + c] = tiles.diag_sums[c];
  });
}

template <class Block>
__device__ void write_key_sum(Block& block, const PlainCall& p, const Tiles& tiles,
                              std::int64_t index) {
  block.run([&](int t) {
    if (t != 0) return;
    float beta = 0;
    for (int r = 0; r < p.tile; ++r) beta += tiles.sums[r];
    p.beta_sums[index] = beta;
  });
}

// Gradients of weights per token.
template <class Block>
__device__ void write_token_gradients(Block& block, const PlainCall& p, const Place& at,
                                      const Tiles& tiles, std::int64_t begin, int rows) {
  for_each(block, rows, [&](int r) {
    for (const ParameterGradient& to : p.weights) {
      if (to.data == nullptr || !to.per_token) continue;
      to.data[at.sequence.batch * to.stride[0] + at.h * to.stride[1] +
              (at.sequence.q_begin + begin + r) * to.stride[2]] =
          to.lln * tiles.dots[r] + to.diag * tiles.diag_dots[r];
    }
  });
}

// Turns da(row, channel) into dq in tiles.y, and adds its part of dalpha to tiles.sums. da is asked
// for once for each element.
template <class Block, class Da>
__device__ void through_queries(Block& block, const PlainCall& p, const Place& at,
                                const Tiles& tiles, std::int64_t begin, int rows, Da da) {
  const Elements e{p, at};
  const float alpha = e.alpha();
  sum_rows(
      block, rows, p.dim, tiles.scratch,
      [&](int r, int l) {
        const float q = e.q(begin + r, l);
        const Exponent a = exponent_of(p, alpha, q);
        const float x = a.slope * da(r, l, a.value);
        tiles.y[r * tiles.ld + l] = alpha * x;
        return x * q;
      },
      [&](int r, float sum) { tiles.sums[r] += sum; });
}

// The same for keys, where tiles.y holds du.
template <class Block>
__device__ void through_keys(Block& block, const PlainCall& p, const Place& at, const Tiles& tiles,
                             std::int64_t begin, int keys) {
  const Elements e{p, at};
  const float beta = e.beta();
  sum_rows(
      block, keys, p.dim, tiles.scratch,
      [&](int r, int l) {
        if (!e.valid(begin + r)) return 0.0F;
        const float k = e.k(begin + r, l);
        float& y = tiles.y[r * tiles.ld + l];
        const float x = exponent_of(p, beta, k).slope * y;
        y = beta * x;
        return x * k;
      },
      [&](int r, float sum) { tiles.sums[r] += sum; });
}

template <class Block>
__device__ void write_lln_statistics(Block& block, const PlainCall& p, const Place& at,
                                     const Tiles& tiles, std::int64_t begin, int rows) {
  for_each(block, rows, [&](int r) {
    const std::int64_t i = row_index(p, at, begin + r);
    p.lln.m[i] = tiles.row.m[r];
    p.lln.inverse[i] = tiles.row.inverse[r];
    p.lln.delta[i] = tiles.delta[r];
  });
}

// Adds dq of the block-diagonal part to tiles.y and stores it, with what the parameters need.
template <class Block>
__device__ void finish_row_gradients(Block& block, const PlainCall& p, const Place& at,
                                     const Tiles& tiles, std::int64_t begin, int rows) {
  if (p.has_diag()) {
    diag_row_gradients(block, p, at, tiles, begin, rows);
    if (p.wants_weights) {
      note_part(block, p, at, tiles, begin, rows, tiles.diag_sums, tiles.diag_dots);
    }
  }
  if (p.wants_weights) write_token_gradients(block, p, at, tiles, begin, rows);
  store_rows(block, p, at, p.call.dq, begin, rows, tiles.y, tiles.ld, p.dim);
}

// dq, and the statistics of rows that the other kernels of the backward read.
struct RowGradients {
  PlainCall p;
  static constexpr const char* kName = "cuda-plain row gradients";
  __host__ __device__ static unsigned tiles(const PlainCall& p) {
    return kTileX | kTileW | kTileY | (p.has_diag() ? kTileK | kTileV : 0U) |
           (p.wants_weights ? kTileZ : 0U);
  }

  template <class Block>
  __device__ void operator()(Block& block, std::int64_t index) const {
    const Place at = part_place<false>(p, index);
    SharedMemory memory{block.shared()};
    const Tiles tiles(memory, p, RowGradients::tiles(p));
    reset_sums(block, p, tiles);
    for (std::int64_t n = at.begin; at.exists && n < at.end; n += p.tile) {
      const int rows = rows_in_tile(p, n, at.end);
      clear(block, tiles.y, p.tile * tiles.ld);
      if (p.has_lln()) lln_rows(block, at, tiles, n, rows);
      finish_row_gradients(block, p, at, tiles, n, rows);
    }
    write_row_sums(block, p, tiles, index);
  }

 private:
  template <class Block>
  __device__ void lln_rows(Block& block, const Place& at, const Tiles& tiles, std::int64_t n,
                           int rows) const {
    reset_rows(block, tiles, rows);
    if (sees_lln(p, at)) {
      const float* const values = p.total.values + (at.s * p.call.heads_k + at.hk) * p.state_size();
      channel_weights(block, p, at, tiles, n, rows);
      load_g<false>(block, p, at, tiles, n, rows);
      multiply_state(block, rows, p.dim, p.dim_v, tiles.w, tiles.ld_v, {values, 1, p.dim_v},
                     tiles.stage,
                     [&](int r, int l, float sum) { tiles.y[r * tiles.ld + l] += sum; });
      sum_rows(
          block, rows, p.dim, tiles.scratch,
          [&](int r, int l) { return tiles.x[r * tiles.ld + l] * tiles.y[r * tiles.ld + l]; },
          [&](int r, float sum) { tiles.delta[r] = sum; });
      if (p.wants_weights) {
        clear(block, tiles.z, p.tile * tiles.ld_v);
        multiply_state(block, rows, p.dim_v, p.dim, tiles.x, tiles.ld, {values, p.dim_v, 1},
                       tiles.stage,
                       [&](int r, int c, float sum) { tiles.z[r * tiles.ld_v + c] += sum; });
        note_part(block, p, at, tiles, n, rows, tiles.lln_sums, tiles.dots);
      }
      through_queries(block, p, at, tiles, n, rows, [&](int r, int l, float) {
        return tiles.x[r * tiles.ld + l] * (tiles.y[r * tiles.ld + l] - tiles.delta[r]);
      });
    }
    write_lln_statistics(block, p, at, tiles, n, rows);
  }
};

// dk and dv.
struct KeyGradients {
  PlainCall p;
  static constexpr const char* kName = "cuda-plain key gradients";
  __host__ __device__ static unsigned tiles(const PlainCall& p) {
    return kTileK | kTileV | kTileY | kTileZ | (p.has_diag() ? kTileX | kTileW : 0U);
  }

  template <class Block>
  __device__ void operator()(Block& block, std::int64_t index) const {
    const Place at = part_place<true>(p, index);
    SharedMemory memory{block.shared()};
    const Tiles tiles(memory, p, KeyGradients::tiles(p));
    reset_sums(block, p, tiles);
    for (std::int64_t n = at.begin; at.exists && n < at.end; n += p.tile) {
      const int keys = rows_in_tile(p, n, at.end);
      clear(block, tiles.y, p.tile * tiles.ld);
      clear(block, tiles.z, p.tile * tiles.ld_v);
      if (p.has_lln() && at.has_keys()) lln_keys(block, at, tiles, n, keys);
      if (p.has_diag()) diag_key_gradients(block, p, at, tiles, n, n + keys);
      store_keys(block, p, at, tiles, n, keys);
    }
    write_key_sum(block, p, tiles, index);
  }

 private:
  template <class Block>
  __device__ void lln_keys(Block& block, const Place& at, const Tiles& tiles, std::int64_t n,
                           int keys) const {
    const std::int64_t pair = at.s * p.call.heads_k + at.hk;
    const float* const c = p.total.m + pair * p.dim;
    const float* const t = p.row_total.s + pair * p.dim;
    const float* const dvalues = p.row_total.values + pair * p.state_size();
    load_keys<true>(block, p, at, tiles, n);
    for_each_element(block, p.tile, p.dim, [&](int r, int l) {
      float& x = tiles.k[r * tiles.ld + l];
      x = exp2f(x - c[l]);
    });
    multiply_state(block, keys, p.dim_v, p.dim, tiles.k, tiles.ld, {dvalues, p.dim_v, 1},
                   tiles.stage,
                   [&](int r, int column, float sum) { tiles.z[r * tiles.ld_v + column] += sum; });
    multiply_state(block, keys, p.dim, p.dim_v, tiles.v, tiles.ld_v, {dvalues, 1, p.dim_v},
                   tiles.stage, [&](int r, int l, float sum) { tiles.y[r * tiles.ld + l] += sum; });
    for_each_element(block, keys, p.dim, [&](int r, int l) {
      float& y = tiles.y[r * tiles.ld + l];
      y = tiles.k[r * tiles.ld + l] * (y - t[l]);
    });
    through_keys(block, p, at, tiles, n, keys);
  }
};

}  // namespace lln::cuda::plain
