// What all kinds of weights share: taking rows and keys, tiles, and products by tiles.
// SPDX-License-Identifier: Apache-2.0
#include "analysis/weights.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <limits>
#include <numeric>

#include "api/kernel.h"

namespace lln::analysis {

using cpu::multiply;
using cpu::padded_f64;

Scratch Weights::make_scratch() const { return scratch_of(0, 0); }

Scratch Weights::scratch_of(std::int64_t width, std::int64_t spare) const {
  Scratch scratch;
  scratch.rows.reserve(kRowBlock);
  scratch.left.resize(size(width * kRowBlock));
  scratch.mass.resize(kRowBlock);
  scratch.right.resize(size(padded_f64(width) * kKeyTile));
  scratch.p.resize(kRowBlock * kKeyTile);
  scratch.log_p.resize(kRowBlock * kKeyTile);
  scratch.spare.resize(size(spare));
  return scratch;
}

std::vector<Scratch> make_scratches(const Weights& weights, const Parallel* parallel) {
  std::vector<Scratch> scratches;
  scratches.reserve(static_cast<std::size_t>(worker_count(parallel)));
  for (int i = 0; i < worker_count(parallel); ++i) scratches.push_back(weights.make_scratch());
  return scratches;
}

void Weights::take_rows(std::span<const std::int64_t> rows, Scratch& scratch) const {
  scratch.rows.assign(rows.begin(), rows.end());
  scratch.ld = padded_f64(static_cast<std::int64_t>(rows.size()));
  load_rows(scratch);
}

void Weights::take_rows(Range rows, Scratch& scratch) const {
  scratch.rows.resize(size(rows.count));
  std::iota(scratch.rows.begin(), scratch.rows.end(), rows.first);
  scratch.ld = padded_f64(rows.count);
  load_rows(scratch);
}

void Weights::take_keys(Range keys, Scratch& scratch) const {
  scratch.keys = keys;
  load_keys(scratch);
}

void Weights::make_tile(Scratch& scratch, bool with_log) const {
  const bool has_log = fill(scratch, with_log);
  const std::int64_t entries = scratch.keys.count * scratch.ld;
  if (with_log && !has_log) cpu::logarithms(scratch.p.data(), entries, scratch.log_p.data());
  if (!causal_ || scratch.rows.front() >= scratch.keys.first + scratch.keys.count - 1) return;
  for (std::int64_t j = 0; j < scratch.keys.count; ++j) {
    for (std::size_t r = 0; r < scratch.rows.size(); ++r) {
      if (scratch.rows[r] >= scratch.keys.first + j) continue;
      const std::size_t at = size(j * scratch.ld) + r;
      scratch.p[at] = 0;
      scratch.log_p[at] = -std::numeric_limits<double>::infinity();
    }
  }
}

void copy_rows(const Weights& weights, Range rows, double* p) {
  const std::int64_t n = weights.tokens();
  Scratch scratch = weights.make_scratch();
  for (std::int64_t r = 0; r < pieces(rows.count, kRowBlock); ++r) {
    const Range block = piece(rows.count, kRowBlock, r);
    weights.take_rows(Range{rows.first + block.first, block.count}, scratch);
    for (std::int64_t k = 0; k < pieces(n, kKeyTile); ++k) {
      weights.take_keys(piece(n, kKeyTile, k), scratch);
      weights.make_tile(scratch, false);
      for (std::int64_t i = 0; i < block.count; ++i) {
        double* const row = p + (block.first + i) * n + scratch.keys.first;
        for (std::int64_t j = 0; j < scratch.keys.count; ++j) {
          row[j] = scratch.p[size(j * scratch.ld + i)];
        }
      }
    }
  }
}

void pack(ConstVectors x, std::int64_t tokens, Range range, double* packed) {
  const std::int64_t ld = padded_f64(x.count);
  for (std::int64_t i = 0; i < range.count; ++i) {
    for (std::int64_t v = 0; v < ld; ++v) {
      packed[i * ld + v] = v < x.count ? x.data[v * tokens + range.first + i] : 0;
    }
  }
}

void unpack(const double* packed, std::int64_t tokens, Range range, Vectors y) {
  const std::int64_t ld = padded_f64(y.count);
  for (std::int64_t i = 0; i < range.count; ++i) {
    for (std::int64_t v = 0; v < y.count; ++v) {
      y.data[v * tokens + range.first + i] = packed[i * ld + v];
    }
  }
}

namespace {

// Keys that are looked at before rows are asked again whether they have weights: nearly always the
// first few settle it.
constexpr std::int64_t kFewKeys = 8;

// Packed pieces of x and y for each worker.
struct Packed {
  Packed(std::int64_t count, const Parallel* parallel)
      : ld(padded_f64(count)), stride(ld * (kRowBlock + kKeyTile)) {
    numbers.resize(size(stride * worker_count(parallel)));
  }
  double* of_rows(int worker) { return numbers.data() + worker * stride; }
  double* of_keys(int worker) { return of_rows(worker) + ld * kRowBlock; }
  std::int64_t ld, stride;
  std::vector<double> numbers;
};

}  // namespace

// A tile is the right operand as it lies: y [count, rows] = x [count, keys] p [keys, rows].
void Weights::apply(ConstVectors x, Vectors y, Parallel* parallel) const {
  std::vector<Scratch> scratches = make_scratches(*this, parallel);
  std::vector<double> sums(size(worker_count(parallel) * x.count * kRowBlock));
  parallel_for(parallel, pieces(tokens_, kRowBlock), [&](std::int64_t task, int worker) {
    Scratch& scratch = scratches[static_cast<std::size_t>(worker)];
    const Range rows = piece(tokens_, kRowBlock, task);
    double* const sum = sums.data() + worker * x.count * kRowBlock;
    take_rows(rows, scratch);
    for (std::int64_t k = 0; k < pieces(tokens_, kKeyTile); ++k) {
      take_keys(piece(tokens_, kKeyTile, k), scratch);
      make_tile(scratch, false);
      multiply(x.count, scratch.ld, scratch.keys.count, {x.data + scratch.keys.first, tokens_, 1},
               scratch.p.data(), scratch.ld, sum, scratch.ld, k > 0);
    }
    for (std::int64_t v = 0; v < x.count; ++v) {
      std::copy_n(sum + v * scratch.ld, rows.count, y.data + v * tokens_ + rows.first);
    }
  });
}

// Tasks are tiles of keys, so that no two of them add to the same number.
void Weights::apply_transposed(ConstVectors x, Vectors y, Parallel* parallel) const {
  std::vector<Scratch> scratches = make_scratches(*this, parallel);
  Packed packed(x.count, parallel);
  parallel_for(parallel, pieces(tokens_, kKeyTile), [&](std::int64_t task, int worker) {
    Scratch& scratch = scratches[static_cast<std::size_t>(worker)];
    const Range keys = piece(tokens_, kKeyTile, task);
    double* const sum = packed.of_keys(worker);
    std::fill_n(sum, keys.count * packed.ld, 0.0);
    take_keys(keys, scratch);
    for (std::int64_t r = 0; r < pieces(tokens_, kRowBlock); ++r) {
      const Range rows = piece(tokens_, kRowBlock, r);
      take_rows(rows, scratch);
      make_tile(scratch, false);
      pack(x, tokens_, rows, packed.of_rows(worker));
      multiply(keys.count, packed.ld, rows.count, {scratch.p.data(), scratch.ld, 1},
               packed.of_rows(worker), packed.ld, sum, packed.ld, true);
    }
    unpack(sum, tokens_, keys, y);
  });
}

std::optional<std::int64_t> Weights::first_empty_row(Parallel* parallel) const {
  if (!may_have_empty_rows()) return std::nullopt;
  std::vector<Scratch> scratches = make_scratches(*this, parallel);
  std::atomic<std::int64_t> first = tokens_;
  parallel_for(parallel, pieces(tokens_, kRowBlock), [&](std::int64_t task, int worker) {
    const Range rows = piece(tokens_, kRowBlock, task);
    if (rows.first > first) return;
    Scratch& scratch = scratches[static_cast<std::size_t>(worker)];
    take_rows(rows, scratch);
    std::array<bool, kRowBlock> has_weights = {};
    const auto end = has_weights.begin() + rows.count;
    auto empty = has_weights.begin();
    for (std::int64_t k = 0; k < pieces(tokens_, kFewKeys) && empty != end; ++k) {
      take_keys(piece(tokens_, kFewKeys, k), scratch);
      make_tile(scratch, false);
      for (std::int64_t j = 0; j < scratch.keys.count; ++j) {
        for (std::int64_t r = 0; r < rows.count; ++r) {
          if (scratch.p[size(j * scratch.ld + r)] != 0) has_weights[size(r)] = true;
        }
      }
      empty = std::find(empty, end, false);
    }
    if (empty == end) return;
    const std::int64_t row = rows.first + (empty - has_weights.begin());
    std::int64_t known = first;
    while (row < known && !first.compare_exchange_weak(known, row)) {
    }
  });
  return first < tokens_ ? std::optional<std::int64_t>(first) : std::nullopt;
}

std::vector<double> Weights::factor_product(Parallel*) const { return {}; }

}  // namespace lln::analysis
