// Moments, Kolmogorov-Smirnov distance, quantiles.
// SPDX-License-Identifier: Apache-2.0
#include "analysis/normality.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace lln::analysis {
namespace {

// A variance below this share of mean^2 + 1 is rounding: the numbers are equal.
constexpr double kNoVariance = 1e-20;
constexpr double kSigmas = 12;

}  // namespace

void PowerSums::add(double x) {
  const double d = x - pivot;
  count += 1;
  powers[0] += d;
  powers[1] += d * d;
  powers[2] += d * d * d;
  powers[3] += d * d * d * d;
}

void PowerSums::add(const PowerSums& other) {
  count += other.count;
  for (std::size_t i = 0; i < powers.size(); ++i) powers[i] += other.powers[i];
}

PowerSums PowerSums::shifted(double h) const {
  PowerSums sums = *this;
  const auto& [s1, s2, s3, s4] = powers;
  sums.powers[0] = s1 + count * h;
  sums.powers[1] = s2 + 2 * h * s1 + count * h * h;
  sums.powers[2] = s3 + 3 * h * s2 + 3 * h * h * s1 + count * h * h * h;
  sums.powers[3] = s4 + 4 * h * s3 + 6 * h * h * s2 + 4 * h * h * h * s1 + count * h * h * h * h;
  return sums;
}

CentralMoments central_moments(const PowerSums& sums) {
  if (sums.count == 0) return {};
  const double n = sums.count, d = sums.powers[0] / n;
  const double m2 = sums.powers[1] / n - d * d;
  const double m3 = sums.powers[2] / n - 3 * d * sums.powers[1] / n + 2 * d * d * d;
  const double m4 = sums.powers[3] / n - 4 * d * sums.powers[2] / n +
                    6 * d * d * sums.powers[1] / n - 3 * d * d * d * d;
  CentralMoments moments{sums.pivot + d, std::max(m2, 0.0)};
  if (m2 > kNoVariance * (1 + moments.mean * moments.mean)) {
    moments.skewness = m3 / (m2 * std::sqrt(m2));
    moments.excess_kurtosis = m4 / (m2 * m2) - 3;
  } else {
    moments.variance = 0;
  }
  return moments;
}

double normal_cdf(double z) { return 0.5 * std::erfc(-z / std::numbers::sqrt2); }

// Bisection of the distribution function: 60 steps are all the digits there are.
double normal_quantile(double probability) {
  double low = -10, high = 10;
  for (int i = 0; i < 60; ++i) {
    const double middle = 0.5 * (low + high);
    (normal_cdf(middle) < probability ? low : high) = middle;
  }
  return 0.5 * (low + high);
}

FineHistogram::FineHistogram(double mean, double sigma)
    : lower_(mean - kSigmas * sigma),
      per_width_(sigma > 0 ? kBins / (2 * kSigmas * sigma) : 1),
      counts_(kBins + 2) {}

void FineHistogram::add(const FineHistogram& other) {
  for (std::size_t i = 0; i < counts_.size(); ++i) counts_[i] += other.counts_[i];
}

double FineHistogram::total() const {
  double sum = 0;
  for (const std::int64_t count : counts_) sum += static_cast<double>(count);
  return sum;
}

double FineHistogram::ks(const CentralMoments& moments) const {
  if (moments.variance == 0) return 0;
  const double sigma = std::sqrt(moments.variance), all = total();
  double below = 0, distance = 0;
  for (std::int64_t bin = 0; bin <= kBins; ++bin) {
    below += static_cast<double>(counts_[static_cast<std::size_t>(bin)]);
    const double expected = normal_cdf((edge(bin) - moments.mean) / sigma);
    distance = std::max(distance, std::abs(below / all - expected));
  }
  return distance;
}

std::vector<QuantilePair> FineHistogram::quantiles(const CentralMoments& moments,
                                                   std::int64_t points) const {
  std::vector<QuantilePair> pairs;
  if (moments.variance == 0) return pairs;
  const double sigma = std::sqrt(moments.variance), all = total();
  double below = 0;
  std::int64_t bin = 0;
  for (std::int64_t i = 1; i <= points; ++i) {
    const double probability = static_cast<double>(i) / static_cast<double>(points + 1);
    double inside = static_cast<double>(counts_[static_cast<std::size_t>(bin)]);
    while (bin <= kBins && below + inside < probability * all) {
      below += inside;
      inside = static_cast<double>(counts_[static_cast<std::size_t>(++bin)]);
    }
    const double part = inside > 0 ? (probability * all - below) / inside : 0;
    const double x = std::lerp(edge(std::max<std::int64_t>(bin - 1, 0)),
                               edge(std::min<std::int64_t>(bin, kBins)), part);
    pairs.push_back({normal_quantile(probability), (x - moments.mean) / sigma});
  }
  return pairs;
}

Histogram FineHistogram::coarse(std::int64_t bins) const {
  std::int64_t first = 1, last = kBins;
  while (first < last && counts_[static_cast<std::size_t>(first)] == 0) ++first;
  while (first < last && counts_[static_cast<std::size_t>(last)] == 0) --last;
  const std::int64_t step = (last - first + bins) / bins;
  Histogram histogram{edge(first - 1), edge(first - 1 + step * bins),
                      std::vector<double>(static_cast<std::size_t>(bins))};
  const double all = total();
  for (std::int64_t bin = first; bin <= last; ++bin) {
    histogram.share[static_cast<std::size_t>((bin - first) / step)] +=
        static_cast<double>(counts_[static_cast<std::size_t>(bin)]) / all;
  }
  return histogram;
}

}  // namespace lln::analysis
