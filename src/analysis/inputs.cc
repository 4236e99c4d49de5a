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

// Sums over pairs of entries with the same token and channel.
struct PairSums {
  PowerSums q, k;
  double qk = 0, qq_kk = 0;
  void add(const PairSums& other) {
    q.add(other.q);
    k.add(other.k);
    qk += other.qk;
    qq_kk += other.qq_kk;
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
  std::vector<PairSums> sums(size(pieces(tokens, step)));
  each_entry(q, k, step, parallel, [&](std::int64_t part, double x, double y) {
    PairSums& sum = sums[size(part)];
    sum.q.add(x);
    sum.k.add(y);
    sum.qk += x * y;
    sum.qq_kk += x * x * y * y;
  });
  PairSums all;
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

  const double n = all.q.count;
  InputStatistics out;
  out.q = distribution(of_q, histograms[0][0], n);
  out.k = distribution(of_k, histograms[0][1], n);
  out.covariance = all.qk / n - of_q.mean * of_k.mean;
  const double squares = all.qq_kk / n - (all.q.powers[1] / n) * (all.k.powers[1] / n);
  out.c_cross = squares - out.covariance * out.covariance;
  return out;
}

}  // namespace lln::analysis
