// Causal linear attention, weight by weight: robust against a late key that is far larger than the
// ones before it, at O(tokens^2 width) exponentials. Entropy against position is all that is asked
// of it.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <limits>

#include "analysis/factor_weights.h"

namespace lln::analysis {

using cpu::padded_f64;

// One walk over the tokens: c is the logsumexp of the keys so far, Z_i that of a_i + c.
CausalFeatureWeights::CausalFeatureWeights(std::int64_t tokens, std::unique_ptr<Exponents> q,
                                           std::unique_ptr<Exponents> k)
    : Weights(tokens, true), q_(std::move(q)), k_(std::move(k)), mass_(size(tokens)) {
  const std::int64_t width = k_->width(), ld = padded_f64(width);
  std::vector<double> a(size(ld)), u(size(ld)), largest(size(ld), -HUGE_VAL), sum(size(ld));
  std::vector<double> spare(size(std::max(q_->spare(), k_->spare())));
  for (std::int64_t i = 0; i < tokens; ++i) {
    k_->load({i, 1}, u.data(), ld, spare.data());
    q_->load({i, 1}, a.data(), ld, spare.data());
    cpu::add_log_sum(u.data(), 1, ld, largest.data(), sum.data());
    double top = -HUGE_VAL, total = 0;
    for (std::size_t l = 0; l < size(width); ++l) {
      a[l] += largest[l] + std::log(sum[l]);
      top = std::max(top, a[l]);
    }
    for (std::size_t l = 0; l < size(width); ++l) total += std::exp(a[l] - top);
    mass_[size(i)] = top + std::log(total);
  }
}

Scratch CausalFeatureWeights::make_scratch() const {
  const std::int64_t width = k_->width();
  return scratch_of(width, kRowBlock * padded_f64(width) + std::max(q_->spare(), k_->spare()));
}

void CausalFeatureWeights::load_rows(Scratch& scratch) const {
  const std::int64_t width = q_->width(), ld = padded_f64(width);
  double* const natural = scratch.spare.data();
  load_listed(scratch.rows, [&](Range rows, std::int64_t at) {
    q_->load(rows, natural + at * ld, ld, natural + kRowBlock * ld);
  });
  transpose(natural, ld, static_cast<std::int64_t>(scratch.rows.size()), width, scratch.left.data(),
            scratch.ld);
  for (std::size_t r = 0; r < scratch.rows.size(); ++r) {
    scratch.mass[r] = mass_[size(scratch.rows[r])];
  }
}

void CausalFeatureWeights::load_keys(Scratch& scratch) const {
  k_->load(scratch.keys, scratch.right.data(), padded_f64(k_->width()),
           scratch.spare.data() + kRowBlock * padded_f64(k_->width()));
}

bool CausalFeatureWeights::fill(Scratch& scratch, bool) const {
  const std::int64_t width = k_->width(), ld = scratch.ld;
  double* const terms = scratch.spare.data();  // [width, ld]
  for (std::int64_t j = 0; j < scratch.keys.count; ++j) {
    const double* const u = scratch.right.data() + j * padded_f64(width);
    for (std::int64_t l = 0; l < width; ++l) {
      for (std::int64_t r = 0; r < ld; ++r) {
        terms[l * ld + r] = scratch.left[size(l * ld + r)] + u[l];
      }
    }
    cpu::exponentiate(terms, width, ld, scratch.mass.data());
    double* const p = scratch.p.data() + j * ld;
    std::copy_n(terms, ld, p);
    for (std::int64_t l = 1; l < width; ++l) {
      for (std::int64_t r = 0; r < ld; ++r) p[r] += terms[l * ld + r];
    }
  }
  return false;
}

}  // namespace lln::analysis
