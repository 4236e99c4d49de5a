// Diag by whole blocks, mixtures part by part, given matrices as they are.
// SPDX-License-Identifier: Apache-2.0
#include "analysis/block_weights.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "analysis/exponents.h"
#include "api/kernel.h"

namespace lln::analysis {

using cpu::multiply;
using cpu::padded_f64;

namespace {

constexpr double kNegInf = -std::numeric_limits<double>::infinity();

}  // namespace

DiagWeights::DiagWeights(const AttentionMatrix& matrix)
    : Weights(matrix.q.shape[2], matrix.causal),
      q_(cpu::rows_of(matrix.q, 0, 0, 0)),
      k_(cpu::rows_of(matrix.k, 0, 0, 0)),
      block_(std::min(matrix.diag_block, tokens())) {}

Range DiagWeights::block_of(std::int64_t row) const {
  return piece(tokens(), block_, row / block_);
}

// spare: queries and a tile of keys as rows, the queries again by channel, a tile of scores, sums.
Scratch DiagWeights::make_scratch() const {
  const std::int64_t ldq = padded_f64(q_.width);
  Scratch scratch = scratch_of(
      0, (kRowBlock + kKeyTile) * ldq + q_.width * kRowBlock + kKeyTile * kRowBlock + kRowBlock);
  scratch.left.resize(size(block_ * kRowBlock));
  return scratch;
}

void DiagWeights::load_rows(Scratch& scratch) const {
  std::size_t first = 0;
  while (first < scratch.rows.size()) {
    std::size_t end = first + 1;  // consecutive rows of one block
    while (end < scratch.rows.size() && scratch.rows[end] == scratch.rows[end - 1] + 1 &&
           scratch.rows[end] % block_ != 0) {
      ++end;
    }
    load_run({scratch.rows[first], static_cast<std::int64_t>(end - first)},
             static_cast<std::int64_t>(first), scratch);
    first = end;
  }
}

// Columns [at, at + rows.count) of left: softmax of the rows over their block.
void DiagWeights::load_run(Range rows, std::int64_t at, Scratch& scratch) const {
  const std::int64_t ldq = padded_f64(q_.width), ld = padded_f64(rows.count);
  const Range block = block_of(rows.first);
  double* const queries = scratch.spare.data();
  double* const keys = queries + kRowBlock * ldq;
  double* const channels = keys + kKeyTile * ldq;
  double* const scores = channels + q_.width * kRowBlock;
  double* const sum = scores + kKeyTile * kRowBlock;
  cpu::load_rows(q_, rows.first, rows.count, 1 / std::sqrt(static_cast<double>(q_.width)), queries,
                 ldq);
  transpose(queries, ldq, rows.count, q_.width, channels, ld);
  double mass[kRowBlock] = {};
  std::fill_n(mass, ld, kNegInf);
  std::fill_n(sum, ld, 0.0);
  for (std::int64_t t = 0; t < pieces(block.count, kKeyTile); ++t) {
    const Range tile = piece(block.count, kKeyTile, t);
    cpu::load_rows(k_, block.first + tile.first, tile.count, 1, keys, ldq);
    multiply(tile.count, ld, q_.width, {keys, ldq, 1}, channels, ld, scores, ld, false);
    for (std::int64_t j = 0; j < tile.count; ++j) {
      for (std::int64_t r = 0; r < rows.count; ++r) {
        if (block.first + tile.first + j >= visible(rows.first + r)) scores[j * ld + r] = kNegInf;
        scratch.left[size((tile.first + j) * scratch.ld + at + r)] = scores[j * ld + r];
      }
    }
    cpu::add_log_sum(scores, tile.count, ld, mass, sum);
  }
  for (std::int64_t r = 0; r < rows.count; ++r) {
    const double shift = mass[r] + std::log(sum[r]);
    for (std::int64_t j = 0; j < block.count; ++j) {
      double& p = scratch.left[size(j * scratch.ld + at + r)];
      p = std::exp(p - shift);
    }
  }
}

bool DiagWeights::fill(Scratch& scratch, bool) const {
  std::fill_n(scratch.p.begin(), scratch.keys.count * scratch.ld, 0.0);
  const std::int64_t keys_end = scratch.keys.first + scratch.keys.count;
  for (std::size_t r = 0; r < scratch.rows.size(); ++r) {
    const Range block = block_of(scratch.rows[r]);
    const std::int64_t end = std::min(keys_end, block.first + block.count);
    for (std::int64_t j = std::max(scratch.keys.first, block.first); j < end; ++j) {
      scratch.p[size((j - scratch.keys.first) * scratch.ld) + r] =
          scratch.left[size((j - block.first) * scratch.ld) + r];
    }
  }
  return false;
}

// Tasks are blocks: rows of other blocks read other keys.
void DiagWeights::apply(ConstVectors x, Vectors y, Parallel* parallel) const {
  const std::int64_t ld = padded_f64(x.count), stride = ld * (block_ + kRowBlock);
  std::vector<Scratch> scratches = make_scratches(*this, parallel);
  std::vector<double> packed(size(worker_count(parallel) * stride));
  parallel_for(parallel, blocks(), [&](std::int64_t task, int worker) {
    Scratch& scratch = scratches[static_cast<std::size_t>(worker)];
    const Range block = piece(tokens(), block_, task);
    double* const in = packed.data() + worker * stride;
    double* const out = in + ld * block_;
    pack(x, tokens(), block, in);
    for (std::int64_t i = 0; i < pieces(block.count, kRowBlock); ++i) {
      Range rows = piece(block.count, kRowBlock, i);
      rows.first += block.first;
      take_rows(rows, scratch);
      multiply(rows.count, ld, block.count, {scratch.left.data(), 1, scratch.ld}, in, ld, out, ld,
               false);
      unpack(out, tokens(), rows, y);
    }
  });
}

void DiagWeights::apply_transposed(ConstVectors x, Vectors y, Parallel* parallel) const {
  const std::int64_t ld = padded_f64(x.count), stride = ld * (block_ + kRowBlock);
  std::vector<Scratch> scratches = make_scratches(*this, parallel);
  std::vector<double> packed(size(worker_count(parallel) * stride));
  parallel_for(parallel, blocks(), [&](std::int64_t task, int worker) {
    Scratch& scratch = scratches[static_cast<std::size_t>(worker)];
    const Range block = piece(tokens(), block_, task);
    double* const out = packed.data() + worker * stride;
    double* const in = out + ld * block_;
    std::fill_n(out, ld * block.count, 0.0);
    for (std::int64_t i = 0; i < pieces(block.count, kRowBlock); ++i) {
      Range rows = piece(block.count, kRowBlock, i);
      rows.first += block.first;
      take_rows(rows, scratch);
      pack(x, tokens(), rows, in);
      multiply(block.count, ld, rows.count, {scratch.left.data(), scratch.ld, 1}, in, ld, out, ld,
               true);
    }
    unpack(out, tokens(), block, y);
  });
}

MixedWeights::MixedWeights(std::unique_ptr<Weights> first, std::unique_ptr<Weights> second,
                           double mix)
    : Weights(first->tokens(), first->causal()),
      first_(std::move(first)),
      second_(std::move(second)),
      mix_(mix) {}

// The scratch of the first part carries that of the second.
Scratch MixedWeights::make_scratch() const {
  Scratch scratch = first_->make_scratch();
  scratch.second = std::make_unique<Scratch>(second_->make_scratch());
  return scratch;
}

void MixedWeights::prepare(Parallel* parallel) {
  first_->prepare(parallel);
  second_->prepare(parallel);
}

void MixedWeights::load_rows(Scratch& scratch) const {
  second_->take_rows(scratch.rows, *scratch.second);
  first_->load_rows(scratch);
}

void MixedWeights::load_keys(Scratch& scratch) const {
  second_->take_keys(scratch.keys, *scratch.second);
  first_->load_keys(scratch);
}

bool MixedWeights::fill(Scratch& scratch, bool) const {
  first_->fill(scratch, false);
  second_->fill(*scratch.second, false);
  for (std::int64_t i = 0; i < scratch.keys.count * scratch.ld; ++i) {
    scratch.p[size(i)] = mix_ * scratch.p[size(i)] + (1 - mix_) * scratch.second->p[size(i)];
  }
  return false;
}

void MixedWeights::mix_in(const std::vector<double>& other, Vectors y) const {
  for (std::size_t i = 0; i < other.size(); ++i) {
    y.data[i] = mix_ * y.data[i] + (1 - mix_) * other[i];
  }
}

void MixedWeights::apply(ConstVectors x, Vectors y, Parallel* parallel) const {
  std::vector<double> other(size(x.count * tokens()));
  first_->apply(x, y, parallel);
  second_->apply(x, {other.data(), x.count}, parallel);
  mix_in(other, y);
}

void MixedWeights::apply_transposed(ConstVectors x, Vectors y, Parallel* parallel) const {
  std::vector<double> other(size(x.count * tokens()));
  first_->apply_transposed(x, y, parallel);
  second_->apply_transposed(x, {other.data(), x.count}, parallel);
  mix_in(other, y);
}

GivenWeights::GivenWeights(const AttentionMatrix& matrix)
    : Weights(matrix.p.shape[2], matrix.causal), p_(matrix.p) {}

Scratch GivenWeights::make_scratch() const { return scratch_of(0, kRowBlock * kKeyTile); }

bool GivenWeights::fill(Scratch& scratch, bool) const {
  cpu::ConstRows rows = cpu::rows_of(p_, 0, 0, 0);
  rows.base += scratch.keys.first * static_cast<std::int64_t>(size_of(p_.dtype));
  rows.width = scratch.keys.count;
  load_listed(scratch.rows, [&](Range range, std::int64_t at) {
    cpu::load_rows(rows, range.first, range.count, 1, scratch.spare.data() + at * kKeyTile,
                   kKeyTile);
  });
  transpose(scratch.spare.data(), kKeyTile, static_cast<std::int64_t>(scratch.rows.size()),
            scratch.keys.count, scratch.p.data(), scratch.ld);
  return false;
}

}  // namespace lln::analysis
