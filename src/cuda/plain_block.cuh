// What the bodies of the plain kernels are written in: phases that all threads of a block run, with
// a barrier after each, and the products, sums and softmaxes of tiles in shared memory.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <cmath>
#include <cstdint>
#include <limits>

#include "math/state.h"

namespace lln::cuda::plain {

inline constexpr int kThreads = 256;
inline constexpr int kMaxTile = 32;          // tokens of a tile, at most
inline constexpr int kStage = 64;            // side of a part of a state that is worked on at once
inline constexpr int kStageLd = kStage + 1;  // odd: neither rows nor columns meet in a bank
inline constexpr int kRowThreads = kThreads / kMaxTile;  // that share the sum of a row
inline constexpr float kInfinity = std::numeric_limits<float>::infinity();

// `Block` below has run(phase), which calls phase(thread) for every thread and then waits for all,
// and shared(), the block's memory.

template <class Block, class Body>
__device__ void for_each(Block& block, int count, Body body) {
  block.run([&](int t) {
    for (int i = t; i < count; i += kThreads) body(i);
  });
}

// Calls body(row, column), neighbouring threads with neighbouring columns.
template <class Block, class Body>
__device__ void for_each_element(Block& block, int rows, int columns, Body body) {
  block.run([&](int t) {
    for (int r = t / 32; r < rows; r += kThreads / 32) {
      for (int c = t % 32; c < columns; c += 32) body(r, c);
    }
  });
}

__device__ inline float larger(float x, float y) { return y > x ? y : x; }  // x where y is NaN
__device__ inline float inverse_or_zero(float x) { return x == 0 ? 0.0F : 1 / x; }

// done(row, total) for the sums, or the largest (at least kNoReference), of term(row, column).
template <bool kSum, class Block, class Term, class Done>
__device__ void reduce_rows(Block& block, int rows, int columns, float* scratch, Term term,
                            Done done) {
  block.run([&](int t) {
    const int r = t / kRowThreads;
    float total = kSum ? 0.0F : kNoReference;
    for (int c = t % kRowThreads; r < rows && c < columns; c += kRowThreads) {
      const float x = term(r, c);
      total = kSum ? total + x : larger(total, x);
    }
    scratch[t] = total;
  });
  block.run([&](int r) {
    if (r >= rows) return;
    float total = scratch[r * kRowThreads];
    for (int i = 1; i < kRowThreads; ++i) {
      const float x = scratch[r * kRowThreads + i];
      total = kSum ? total + x : larger(total, x);
    }
    done(r, total);
  });
}

template <class Block, class Term, class Done>
__device__ void sum_rows(Block& block, int rows, int columns, float* scratch, Term term,
                         Done done) {
  reduce_rows<true>(block, rows, columns, scratch, term, done);
}

template <class Block, class Term, class Done>
__device__ void max_rows(Block& block, int rows, int columns, float* scratch, Term term,
                         Done done) {
  reduce_rows<false>(block, rows, columns, scratch, term, done);
}

// The running softmax of a row or a channel: reference and mass of all that it has seen, the share
// that what it had seen before the last tile has in that, and 1 / mass.
struct Running {
  float* m;
  float* s;
  float* keep;
  float* inverse;

  __device__ void reset(int i) const {
    m[i] = kNoReference;
    s[i] = 0;
  }
  // Adds weights that sum to `sum` against the reference `top`.
  __device__ void add(int i, float top, float sum) const {
    const float before = s[i] * exp2f(m[i] - top);
    const float total = before + sum;
    m[i] = top;
    s[i] = total;
    inverse[i] = inverse_or_zero(total);
    keep[i] = before * inverse[i];
  }
};

// Exponents x[rows, columns] (-inf: not there) become weights that sum to one together with what
// the row has seen before, whose average is to be multiplied with `keep`. Averages instead of sums
// that are divided at the end: values near the largest number do not overflow.
template <class Block>
__device__ void soften_rows(Block& block, float* x, int ld, int rows, int columns,
                            const Running& run, float* scratch) {
  float* const top = run.inverse;  // until the masses are known
  max_rows(
      block, rows, columns, scratch, [&](int r, int c) { return x[r * ld + c]; },
      [&](int r, float most) { top[r] = larger(run.m[r], most); });
  sum_rows(
      block, rows, columns, scratch,
      [&](int r, int c) { return x[r * ld + c] = exp2f(x[r * ld + c] - top[r]); },
      [&](int r, float sum) { run.add(r, top[r], sum); });
  for_each_element(block, rows, columns, [&](int r, int c) { x[r * ld + c] *= run.inverse[r]; });
}

// The same along columns.
template <class Block>
__device__ void soften_columns(Block& block, float* x, int ld, int rows, int columns,
                               const Running& run) {
  for_each(block, columns, [&](int c) {
    float top = run.m[c];
    for (int r = 0; r < rows; ++r) top = larger(top, x[r * ld + c]);
    float sum = 0;
    for (int r = 0; r < rows; ++r) sum += x[r * ld + c] = exp2f(x[r * ld + c] - top);
    run.add(c, top, sum);
    for (int r = 0; r < rows; ++r) x[r * ld + c] *= run.inverse[c];
  });
}

// Element (i, j) at data[i * row + j * column].
struct Matrix {
  const float* data;
  int row;
  int column;
};

struct Span {
  int begin, end;
};

// Which part of the depth counts for a row of a product: the rest is not multiplied, because a zero
// weight times NaN would be NaN.
struct WholeDepth {
  static constexpr bool kWhole = true;
  __device__ Span operator()(int) const { return {0, 0}; }
};

template <class Rows>
struct PartOfDepth {
  static constexpr bool kWhole = false;
  Rows rows;
  __device__ Span operator()(int r) const { return rows(r); }
};
template <class Rows>
PartOfDepth(Rows) -> PartOfDepth<Rows>;

// store(row, column, sum over depth of a b). A thread has 16 x kRows rows and 16 x kColumns columns
// apart; what lies outside repeats the last row or column and is not stored.
template <int kRows, int kColumns, class Block, class Depth, class Store>
__device__ void multiply(Block& block, int rows, int columns, int depth, const Matrix& a,
                         const Matrix& b, Depth part, Store store) {
  block.run([&](int t) {
    const int x = t % 16, y = t / 16;
    for (int r0 = y; r0 - y < rows; r0 += 16 * kRows) {
      for (int c0 = x; c0 - x < columns; c0 += 16 * kColumns) {
        const float* left[kRows];
        const float* right[kColumns];
        Span span[kRows];
        float sum[kRows][kColumns] = {};
        for (int i = 0; i < kRows; ++i) {
          const int r = r0 + 16 * i < rows ? r0 + 16 * i : rows - 1;
          left[i] = a.data + r * a.row;
          span[i] = part(r);
        }
        for (int j = 0; j < kColumns; ++j) {
          const int c = c0 + 16 * j < columns ? c0 + 16 * j : columns - 1;
          right[j] = b.data + c * b.column;
        }
        for (int k = 0; k < depth; ++k) {
          float values[kColumns];
          for (int j = 0; j < kColumns; ++j) values[j] = right[j][k * b.row];
          for (int i = 0; i < kRows; ++i) {
            if (!Depth::kWhole && (k < span[i].begin || k >= span[i].end)) continue;
            const float weight = left[i][k * a.column];
            for (int j = 0; j < kColumns; ++j) sum[i][j] += weight * values[j];
          }
        }
        for (int i = 0; i < kRows; ++i) {
          for (int j = 0; j < kColumns; ++j) {
            const int r = r0 + 16 * i, c = c0 + 16 * j;
            if (r < rows && c < columns) store(r, c, sum[i][j]);
          }
        }
      }
    }
  });
}

// Products of a tile of tokens.
template <class Block, class Store>
__device__ void multiply_tile(Block& block, int rows, int columns, int depth, const Matrix& a,
                              const Matrix& b, Store store) {
  multiply<2, 4>(block, rows, columns, depth, a, b, WholeDepth{}, store);
}

template <class Block, class Rows, class Store>
__device__ void multiply_part(Block& block, int rows, int columns, int depth, const Matrix& a,
                              const Matrix& b, Rows spans, Store store) {
  multiply<2, 4>(block, rows, columns, depth, a, b, PartOfDepth{spans}, store);
}

// add(row, column, part of the sum) for x[rows, depth] in shared memory times b[depth, columns] in
// device memory, which passes through `stage`.
template <class Block, class Add>
__device__ void multiply_state(Block& block, int rows, int columns, int depth, const float* x,
                               int ld, const Matrix& b, float* stage, Add add) {
  for (int c0 = 0; c0 < columns; c0 += kStage) {
    for (int k0 = 0; k0 < depth; k0 += kStage) {
      const int width = columns - c0 < kStage ? columns - c0 : kStage;
      const int height = depth - k0 < kStage ? depth - k0 : kStage;
      const float* const from = b.data + k0 * b.row + c0 * b.column;
      if (b.column == 1) {
        for_each_element(block, height, width,
                         [&](int k, int c) { stage[k * kStageLd + c] = from[k * b.row + c]; });
      } else {
        for_each_element(block, width, height,
                         [&](int c, int k) { stage[k * kStageLd + c] = from[k + c * b.column]; });
      }
      multiply_tile(block, rows, width, height, {x + k0, ld, 1}, {stage, kStageLd, 1},
                    [&](int r, int c, float sum) { add(r, c0 + c, sum); });
    }
  }
}

}  // namespace lln::cuda::plain
