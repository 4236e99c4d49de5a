// How Gaussian q and k are, and how much they know of each other.
// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cmath>

#include "analysis/instruments.h"
#include "analysis/normality.h"
#include "api/kernel.h"

namespace lln::analysis {
namespace {

using cpu::padded_f64;

// Sums over pairs of entries with the same token and channel, around the means of q and k: around
// zero the digits of a large mean would push out those of the rest.
struct PairSums {
  PowerSums q, k;
  double qk = 0, qq_k = 0, q_kk = 0, qq_kk = 0;
  void add(double x, double y) {
    q.add(x);
    k.add(y);
    x -= q.pivot;
    y -= k.pivot;
    qk += x * y;
    qq_k += x * x * y;
    q_kk += x * y * y;
    qq_kk += x * x * y * y;
  }
  void add(const PairSums& other) {
    q.add(other.q);
    k.add(other.k);
    qk += other.qk;
    qq_k += other.qq_k;
    q_kk += other.q_kk;
    qq_kk += other.qq_kk;
  }
  double covariance() const {
    const double n = q.count;
    return qk / n - (q.powers[0] / n) * (k.powers[0] / n);
  }
  // Cov(q^2, k^2), with q = a + x and k = b + y for the pivots a and b.
  double covariance_of_squares() const {
    const double n = q.count, a = q.pivot, b = k.pivot;
    const double x = q.powers[0] / n, y = k.powers[0] / n;
    const double xx = q.powers[1] / n, yy = k.powers[1] / n;
    return 4 * a * b * covariance() + 2 * a * (q_kk / n - x * yy) + 2 * b * (qq_k / n - xx * y) +
           qq_kk / n - xx * yy;
  }
};

// body(part, q, k) for all entries of some tokens, part after part on many threads.
template <class Body>
void each_entry(const ConstView& q, const ConstView& k, std::int64_t step, Parallel* parallel,
                Body&& body) {
  const std::int64_t tokens = q.shape[2], dim = q.shape[3], ld = padded_f64(dim);
  const cpu::ConstRows of_q = cpu::rows_of(q, 0, 0, 0), of_k = cpu::rows_of(k, 0, 0, 0);
  const std::int64_t stride = 2 * kKeyTile * ld;
  std::vector<double> numbers(size(stride * worker_count(parallel)));
  parallel_for(parallel, pieces(tokens, step), [&](std::int64_t part, int worker) {
    double* const a = numbers.data() + worker * stride;
    double* const b = a + kKeyTile * ld;
    const Range range = piece(tokens, step, part);
    for (std::int64_t i = 0; i < pieces(range.count, kKeyTile); ++i) {
      const Range tile = piece(range.count, kKeyTile, i);
      cpu::load_rows(of_q, range.first + tile.first, tile.count, 1, a, ld);
      cpu::load_rows(of_k, range.first + tile.first, tile.count, 1, b, ld);
      for (std::int64_t n = 0; n < tile.count; ++n) {
        for (std::int64_t c = 0; c < dim; ++c) body(part, a[n * ld + c], b[n * ld + c]);
      }
    }
  });
}

Distribution distribution(const CentralMoments& moments, const FineHistogram& histogram,
                          double count) {
  const double unbiased = count > 1 ? moments.variance * count / (count - 1) : 0;
  return {moments.mean, std::sqrt(unbiased), moments.skewness, moments.excess_kurtosis,
          histogram.ks(moments)};
}

}  // namespace

InputStatistics input_statistics(const ConstView& q, const ConstView& k, Parallel* parallel) {
  const std::int64_t tokens = q.shape[2];
  const std::int64_t step = std::max<std::int64_t>(kKeyTile, pieces(tokens, kParts));
  std::vector<std::array<double, 2>> totals(size(pieces(tokens, step)));
  each_entry(q, k, step, parallel, [&](std::int64_t part, double x, double y) {
    totals[size(part)][0] += x;
    totals[size(part)][1] += y;
  });
  PairSums all;
  const auto entries = static_cast<double>(tokens * q.shape[3]);
  for (const auto& total : totals) {
    all.q.pivot += total[0] / entries;
    all.k.pivot += total[1] / entries;
  }
  std::vector<PairSums> sums(totals.size(), all);
  each_entry(q, k, step, parallel,
             [&](std::int64_t part, double x, double y) { sums[size(part)].add(x, y); });
  for (const PairSums& sum : sums) all.add(sum);
  const CentralMoments of_q = central_moments(all.q), of_k = central_moments(all.k);

  const FineHistogram empty_q(of_q.mean, std::sqrt(of_q.variance)),
      empty_k(of_k.mean, std::sqrt(of_k.variance));
  std::vector<std::array<FineHistogram, 2>> histograms(sums.size(), {empty_q, empty_k});
  each_entry(q, k, step, parallel, [&](std::int64_t part, double x, double y) {
    histograms[size(part)][0].add(x);
    histograms[size(part)][1].add(y);
  });
  for (std::size_t i = 1; i < histograms.size(); ++i) {
    histograms[0][0].add(histograms[i][0]);
    histograms[0][1].add(histograms[i][1]);
  }

  InputStatistics out;
  out.q = distribution(of_q, histograms[0][0], entries);
  out.k = distribution(of_k, histograms[0][1], entries);
  out.covariance = all.covariance();
  out.c_cross = all.covariance_of_squares() - out.covariance * out.covariance;
  return out;
}

}  // namespace lln::analysis
