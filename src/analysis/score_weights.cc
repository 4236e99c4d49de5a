// Softmax and quadratic weights, by tiles of scores.
// SPDX-License-Identifier: Apache-2.0
#include "analysis/score_weights.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "analysis/exponents.h"
#include "api/kernel.h"

namespace lln::analysis {

using cpu::padded_f64;

namespace {

constexpr double kNegInf = -std::numeric_limits<double>::infinity();

// out_i = t_i^T (sum_j w_j s_j s_j^T) t_i for rows s of `sources` and t of `targets`.
template <class Factor>
void quadratic_forms(const cpu::ConstRows& sources, const cpu::ConstRows& targets,
                     std::int64_t tokens, Factor&& factor, double* out, Parallel* parallel) {
  const std::int64_t d = sources.width, ld = padded_f64(d);
  const std::int64_t step = std::max(kKeyTile, pieces(tokens, kParts));
  const std::int64_t parts = pieces(tokens, step);
  std::vector<double> sums(size(parts * d * ld));
  std::vector<double> tiles(size(worker_count(parallel) * 2 * kKeyTile * ld));
  parallel_for(parallel, parts, [&](std::int64_t part, int worker) {
    double* const rows = tiles.data() + worker * 2 * kKeyTile * ld;
    double* const weighted = rows + kKeyTile * ld;
    const Range range = piece(tokens, step, part);
    for (std::int64_t t = 0; t < pieces(range.count, kKeyTile); ++t) {
      const Range tile = piece(range.count, kKeyTile, t);
      cpu::load_rows(sources, range.first + tile.first, tile.count, 1, rows, ld);
      for (std::int64_t j = 0; j < tile.count; ++j) {
        const double w = factor(range.first + tile.first + j);
        for (std::int64_t c = 0; c < ld; ++c) weighted[j * ld + c] = w * rows[j * ld + c];
      }
      cpu::multiply(d, ld, tile.count, {rows, 1, ld}, weighted, ld, sums.data() + part * d * ld, ld,
                    true);
    }
  });
  std::vector<double> total(size(d * ld));
  for (std::size_t i = 0; i < sums.size(); ++i) total[i % total.size()] += sums[i];
  parallel_for(parallel, pieces(tokens, kKeyTile), [&](std::int64_t task, int worker) {
    double* const rows = tiles.data() + worker * 2 * kKeyTile * ld;
    double* const images = rows + kKeyTile * ld;
    const Range range = piece(tokens, kKeyTile, task);
    cpu::load_rows(targets, range.first, range.count, 1, rows, ld);
    cpu::multiply(range.count, ld, d, {rows, ld, 1}, total.data(), ld, images, ld, false);
    for (std::int64_t i = 0; i < range.count; ++i) {
      double sum = 0;
      for (std::int64_t c = 0; c < d; ++c) sum += rows[i * ld + c] * images[i * ld + c];
      out[range.first + i] = sum;
    }
  });
}

}  // namespace

ScoreWeights::ScoreWeights(const AttentionMatrix& matrix, double scale)
    : Weights(matrix.q.shape[2], matrix.causal),
      q_(cpu::rows_of(matrix.q, 0, 0, 0)),
      k_(cpu::rows_of(matrix.k, 0, 0, 0)),
      scale_(scale) {}

Scratch ScoreWeights::make_scratch() const {
  return scratch_of(dim(), kRowBlock * padded_f64(dim()) + kRowBlock);
}

void ScoreWeights::prepare(Parallel* parallel) {
  if (!mass_.empty()) return;
  std::vector<Scratch> scratches = make_scratches(*this, parallel);
  std::vector<double> mass(size(tokens()));
  parallel_for(parallel, pieces(tokens(), kRowBlock), [&](std::int64_t task, int worker) {
    Scratch& scratch = scratches[static_cast<std::size_t>(worker)];
    const Range rows = piece(tokens(), kRowBlock, task);
    take_rows(rows, scratch);
    std::copy_n(scratch.mass.begin(), rows.count, mass.begin() + rows.first);
  });
  mass_ = std::move(mass);
}

void ScoreWeights::load_rows(Scratch& scratch) const {
  const std::int64_t ld = padded_f64(dim());
  load_listed(scratch.rows, [&](Range rows, std::int64_t at) {
    cpu::load_rows(q_, rows.first, rows.count, scale_, scratch.spare.data() + at * ld, ld);
  });
  transpose(scratch.spare.data(), ld, static_cast<std::int64_t>(scratch.rows.size()), dim(),
            scratch.left.data(), scratch.ld);
  if (mass_.empty()) return find_mass(scratch);
  for (std::size_t r = 0; r < scratch.rows.size(); ++r) {
    scratch.mass[r] = mass_[size(scratch.rows[r])];
  }
}

void ScoreWeights::load_keys(Scratch& scratch) const {
  cpu::load_rows(k_, scratch.keys.first, scratch.keys.count, 1, scratch.right.data(),
                 padded_f64(dim()));
}

void ScoreWeights::fill_scores(Scratch& scratch) const {
  cpu::multiply(scratch.keys.count, scratch.ld, dim(), {scratch.right.data(), padded_f64(dim()), 1},
                scratch.left.data(), scratch.ld, scratch.p.data(), scratch.ld, false);
}

// One more walk over the keys.
void ScoreWeights::find_mass(Scratch& scratch) const {
  double* const sums = scratch.spare.data() + kRowBlock * padded_f64(dim());
  std::fill_n(scratch.mass.begin(), scratch.ld, kNegInf);
  std::fill_n(sums, scratch.ld, 0.0);
  const std::int64_t end = visible(scratch.rows.back());
  for (std::int64_t tile = 0; tile < pieces(end, kKeyTile); ++tile) {
    take_keys(piece(end, kKeyTile, tile), scratch);
    fill_scores(scratch);
    add_mass(scratch, sums);
  }
  for (std::size_t r = 0; r < scratch.rows.size(); ++r) scratch.mass[r] += std::log(sums[r]);
}

SoftmaxWeights::SoftmaxWeights(const AttentionMatrix& matrix)
    : ScoreWeights(matrix, 1 / std::sqrt(static_cast<double>(matrix.q.shape[3]))) {}

bool SoftmaxWeights::fill(Scratch& scratch, bool with_log) const {
  fill_scores(scratch);
  if (with_log) {
    for (std::int64_t j = 0; j < scratch.keys.count; ++j) {
      for (std::int64_t r = 0; r < scratch.ld; ++r) {
        const auto at = size(j * scratch.ld + r);
        scratch.log_p[at] = scratch.p[at] - scratch.mass[size(r)];
      }
    }
  }
  cpu::exponentiate(scratch.p.data(), scratch.keys.count, scratch.ld, scratch.mass.data());
  return with_log;
}

void SoftmaxWeights::add_mass(Scratch& scratch, double* sums) const {
  for (std::int64_t j = 0; causal() && j < scratch.keys.count; ++j) {
    for (std::size_t r = 0; r < scratch.rows.size(); ++r) {
      if (scratch.keys.first + j > scratch.rows[r]) {
        scratch.p[size(j * scratch.ld) + r] = kNegInf;
      }
    }
  }
  cpu::add_log_sum(scratch.p.data(), scratch.keys.count, scratch.ld, scratch.mass.data(), sums);
}

QuadraticWeights::QuadraticWeights(const AttentionMatrix& matrix) : ScoreWeights(matrix, 1) {}

double QuadraticWeights::weight(std::int64_t row) const {
  return mass_of(row) > kNegInf ? std::exp(-mass_of(row)) : 0;
}

void QuadraticWeights::apply(ConstVectors x, Vectors y, Parallel* parallel) const {
  if (causal()) return Weights::apply(x, y, parallel);
  for (std::int64_t v = 0; v < x.count; ++v) {
    const double* const in = x.data + v * tokens();
    double* const out = y.data + v * tokens();
    quadratic_forms(
        k(), q(), tokens(), [&](std::int64_t j) { return in[j]; }, out, parallel);
    for (std::int64_t i = 0; i < tokens(); ++i) out[i] *= weight(i);
  }
}

void QuadraticWeights::apply_transposed(ConstVectors x, Vectors y, Parallel* parallel) const {
  if (causal()) return Weights::apply_transposed(x, y, parallel);
  for (std::int64_t v = 0; v < x.count; ++v) {
    const double* const in = x.data + v * tokens();
    quadratic_forms(
        q(), k(), tokens(), [&](std::int64_t i) { return in[i] * weight(i); },
        y.data + v * tokens(), parallel);
  }
}

// A query that is orthogonal to all keys has no weights: its row is zero.
bool QuadraticWeights::fill(Scratch& scratch, bool) const {
  fill_scores(scratch);
  double factor[kRowBlock] = {};
  for (std::int64_t r = 0; r < scratch.ld; ++r) {
    const double mass = scratch.mass[size(r)];
    factor[r] = mass > kNegInf ? std::exp(-mass / 2) : 0;  // of the score, before it is squared
  }
  for (std::int64_t j = 0; j < scratch.keys.count; ++j) {
    for (std::int64_t r = 0; r < scratch.ld; ++r) {
      double& p = scratch.p[size(j * scratch.ld + r)];
      p *= factor[r];
      p *= p;
    }
  }
  return false;
}

void QuadraticWeights::add_mass(Scratch& scratch, double* sums) const {
  for (std::size_t r = 0; r < scratch.rows.size(); ++r) {
    scratch.mass[r] = 0;  // no exponents here: ln of the plain sum
    const std::int64_t seen =
        std::min(scratch.keys.count, visible(scratch.rows[r]) - scratch.keys.first);
    for (std::int64_t j = 0; j < seen; ++j) {
      const double score = scratch.p[size(j * scratch.ld) + r];
      sums[r] += score * score;
    }
  }
}

}  // namespace lln::analysis
