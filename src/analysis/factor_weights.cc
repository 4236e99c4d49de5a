// Products with L R^T, and the factors of positive features.
// SPDX-License-Identifier: Apache-2.0
#include "analysis/factor_weights.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "api/kernel.h"

namespace lln::analysis {

using cpu::multiply;
using cpu::padded_f64;

namespace {

constexpr double kNegInf = -std::numeric_limits<double>::infinity();

// Tokens of one part of a sum: whole tiles, at most kParts parts.
std::int64_t part_tokens(std::int64_t tokens) {
  const std::int64_t tiles = pieces(tokens, kKeyTile * kParts);
  return kKeyTile * std::max<std::int64_t>(tiles, 8);
}

}  // namespace

bool FactorWeights::fill(Scratch& scratch, bool) const {
  multiply(scratch.keys.count, scratch.ld, width_, {scratch.right.data(), padded_f64(width_), 1},
           scratch.left.data(), scratch.ld, scratch.p.data(), scratch.ld, false);
  return false;
}

// The sum over all tokens of [rows, columns] numbers: body(range, scratch, worker, sum) adds those
// of at most kRowBlock tokens.
template <class Body>
std::vector<double> FactorWeights::sum_parts(std::int64_t rows, std::int64_t columns,
                                             Parallel* parallel, Body&& body) const {
  std::vector<Scratch> scratches = make_scratches(*this, parallel);
  const std::int64_t step = part_tokens(tokens()), parts = pieces(tokens(), step);
  std::vector<double> sums(size(parts * rows * columns));
  parallel_for(parallel, parts, [&](std::int64_t part, int worker) {
    const Range tokens_of_part = piece(tokens(), step, part);
    for (std::int64_t i = 0; i < pieces(tokens_of_part.count, kRowBlock); ++i) {
      Range block = piece(tokens_of_part.count, kRowBlock, i);
      block.first += tokens_of_part.first;
      body(block, scratches[static_cast<std::size_t>(worker)], worker,
           sums.data() + part * rows * columns);
    }
  });
  std::vector<double> total(size(rows * columns));
  for (std::size_t i = 0; i < sums.size(); ++i) total[i % total.size()] += sums[i];
  return total;
}

// y in blocks of rows: body(range, scratch, out [range.count, padded count]).
template <class Body>
void FactorWeights::each_block(ConstVectors x, Vectors y, Parallel* parallel, Body&& body) const {
  std::vector<Scratch> scratches = make_scratches(*this, parallel);
  const std::int64_t ld = padded_f64(x.count);
  std::vector<double> packed(size(worker_count(parallel) * ld * kRowBlock));
  parallel_for(parallel, pieces(tokens(), kRowBlock), [&](std::int64_t task, int worker) {
    const Range range = piece(tokens(), kRowBlock, task);
    double* const out = packed.data() + worker * ld * kRowBlock;
    body(range, scratches[static_cast<std::size_t>(worker)], out);
    unpack(out, tokens(), range, y);
  });
}

void FactorWeights::apply(ConstVectors x, Vectors y, Parallel* parallel) const {
  if (causal()) return Weights::apply(x, y, parallel);
  const std::int64_t ld = padded_f64(x.count), ldr = padded_f64(width_);
  std::vector<double> packed(size(worker_count(parallel) * ld * kRowBlock));
  const std::vector<double> channels =  // R^T x [width, ld]
      sum_parts(width_, ld, parallel, [&](Range keys, Scratch& scratch, int worker, double* sum) {
        double* const in = packed.data() + worker * ld * kRowBlock;
        pack(x, tokens(), keys, in);
        take_keys(keys, scratch);
        multiply(width_, ld, keys.count, {scratch.right.data(), 1, ldr}, in, ld, sum, ld, true);
      });
  each_block(x, y, parallel, [&](Range rows, Scratch& scratch, double* out) {
    take_rows(rows, scratch);
    multiply(rows.count, ld, width_, {scratch.left.data(), 1, scratch.ld}, channels.data(), ld, out,
             ld, false);
  });
}

void FactorWeights::apply_transposed(ConstVectors x, Vectors y, Parallel* parallel) const {
  if (causal()) return Weights::apply_transposed(x, y, parallel);
  const std::int64_t ld = padded_f64(x.count), ldr = padded_f64(width_);
  std::vector<double> packed(size(worker_count(parallel) * ld * kRowBlock));
  const std::vector<double> channels =  // L^T x [width, ld]
      sum_parts(width_, ld, parallel, [&](Range rows, Scratch& scratch, int worker, double* sum) {
        double* const in = packed.data() + worker * ld * kRowBlock;
        pack(x, tokens(), rows, in);
        take_rows(rows, scratch);
        multiply(width_, ld, rows.count, {scratch.left.data(), scratch.ld, 1}, in, ld, sum, ld,
                 true);
      });
  each_block(x, y, parallel, [&](Range keys, Scratch& scratch, double* out) {
    take_keys(keys, scratch);
    multiply(keys.count, ld, width_, {scratch.right.data(), ldr, 1}, channels.data(), ld, out, ld,
             false);
  });
}

// Summed as its transpose L^T R, whose operands lie as a product wants them.
std::vector<double> FactorWeights::factor_product(Parallel* parallel) const {
  const std::int64_t ld = padded_f64(width_);
  const std::vector<double> sums =
      sum_parts(width_, ld, parallel, [&](Range block, Scratch& scratch, int, double* sum) {
        take_rows(block, scratch);
        take_keys(block, scratch);
        multiply(width_, ld, block.count, {scratch.left.data(), scratch.ld, 1},
                 scratch.right.data(), ld, sum, ld, true);
      });
  std::vector<double> product(size(width_ * width_));
  transpose(sums.data(), ld, width_, width_, product.data(), width_);
  return product;
}

FeatureWeights::FeatureWeights(std::int64_t tokens, std::unique_ptr<Exponents> q,
                               std::unique_ptr<Exponents> k, Parallel* parallel)
    : FactorWeights(tokens, q->width(), false),
      q_(std::move(q)),
      k_(std::move(k)),
      c_(size(padded_f64(width()))) {
  sum_keys(parallel);
}

Scratch FeatureWeights::make_scratch() const {
  return scratch_of(width(), kRowBlock * padded_f64(width()) + padded_f64(kRowBlock) +
                                 std::max(q_->spare(), k_->spare()));
}

// c = logsumexp over all keys, in parts as every sum.
void FeatureWeights::sum_keys(Parallel* parallel) {
  const std::int64_t ld = padded_f64(width());
  const std::int64_t step = part_tokens(tokens()), parts = pieces(tokens(), step);
  std::vector<Scratch> scratches = make_scratches(*this, parallel);
  std::vector<double> largest(size(parts * ld), kNegInf), sum(size(parts * ld));
  parallel_for(parallel, parts, [&](std::int64_t part, int worker) {
    Scratch& scratch = scratches[static_cast<std::size_t>(worker)];
    const Range keys = piece(tokens(), step, part);
    for (std::int64_t i = 0; i < pieces(keys.count, kKeyTile); ++i) {
      Range tile = piece(keys.count, kKeyTile, i);
      tile.first += keys.first;
      k_->load(tile, scratch.right.data(), ld, scratch.spare.data());
      cpu::add_log_sum(scratch.right.data(), tile.count, ld, largest.data() + part * ld,
                       sum.data() + part * ld);
    }
  });
  for (std::int64_t l = 0; l < ld; ++l) {
    double top = kNegInf, total = 0;
    for (std::int64_t part = 0; part < parts; ++part) {
      top = std::max(top, largest[size(part * ld + l)]);
    }
    for (std::int64_t part = 0; part < parts; ++part) {
      const auto at = size(part * ld + l);
      total += sum[at] * std::exp(largest[at] - top);
    }
    c_[size(l)] = top + std::log(total);
  }
}

// mass is the row's Z, ln of the sum over channels of e^(a + c).
void FeatureWeights::load_rows(Scratch& scratch) const {
  const std::int64_t ldq = padded_f64(width()), ld = scratch.ld;
  const auto count = static_cast<std::int64_t>(scratch.rows.size());
  double* const natural = scratch.spare.data();
  double* const sum = natural + kRowBlock * ldq;
  load_listed(scratch.rows, [&](Range rows, std::int64_t at) {
    q_->load(rows, natural + at * ldq, ldq, sum + kRowBlock);
  });
  for (std::int64_t l = 0; l < width(); ++l) {
    double* const channel = scratch.left.data() + l * ld;
    for (std::int64_t r = 0; r < ld; ++r) {
      channel[r] = c_[size(l)] + (r < count ? natural[r * ldq + l] : 0);
    }
  }
  std::fill_n(scratch.mass.begin(), ld, kNegInf);
  std::fill_n(sum, ld, 0.0);
  cpu::add_log_sum(scratch.left.data(), width(), ld, scratch.mass.data(), sum);
  for (std::int64_t r = 0; r < ld; ++r) scratch.mass[size(r)] += std::log(sum[r]);
  cpu::exponentiate(scratch.left.data(), width(), ld, scratch.mass.data());
}

void FeatureWeights::load_keys(Scratch& scratch) const {
  const std::int64_t ld = padded_f64(width());
  k_->load(scratch.keys, scratch.right.data(), ld, scratch.spare.data());
  cpu::exponentiate(scratch.right.data(), scratch.keys.count, ld, c_.data());
}

LinearWeights::LinearWeights(const AttentionMatrix& matrix)
    : FactorWeights(matrix.q.shape[2], matrix.q.shape[3], matrix.causal),
      q_(cpu::rows_of(matrix.q, 0, 0, 0)),
      k_(cpu::rows_of(matrix.k, 0, 0, 0)),
      scale_(1 / (static_cast<double>(tokens()) * std::sqrt(static_cast<double>(width())))) {}

Scratch LinearWeights::make_scratch() const {
  return scratch_of(width(), kRowBlock * padded_f64(width()));
}

void LinearWeights::load_rows(Scratch& scratch) const {
  const std::int64_t ld = padded_f64(width());
  load_listed(scratch.rows, [&](Range rows, std::int64_t at) {
    cpu::load_rows(q_, rows.first, rows.count, scale_, scratch.spare.data() + at * ld, ld);
  });
  transpose(scratch.spare.data(), ld, static_cast<std::int64_t>(scratch.rows.size()), width(),
            scratch.left.data(), scratch.ld);
}

void LinearWeights::load_keys(Scratch& scratch) const {
  cpu::load_rows(k_, scratch.keys.first, scratch.keys.count, 1, scratch.right.data(),
                 padded_f64(width()));
}

}  // namespace lln::analysis
