// How far numbers are from a normal distribution, from one pass over them: power sums around a
// pivot, and a histogram so fine that quantiles and the Kolmogorov-Smirnov distance can be read
// off it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "lln/instruments.h"

namespace lln::analysis {

// Sums of (x - pivot)^1..4.
struct PowerSums {
  double pivot = 0;
  double count = 0;
  std::array<double, 4> powers = {};

  void add(double x);
  void add(const PowerSums& other);  // of the same pivot
  // The same numbers, each larger by `shift`.
  PowerSums shifted(double shift) const;
};

struct CentralMoments {
  double mean = 0, variance = 0;  // variance over the count, not one less
  double skewness = 0, excess_kurtosis = 0;
};
// Skewness and kurtosis are 0 where the numbers are equal up to rounding.
CentralMoments central_moments(const PowerSums& sums);

// Counts in bins of equal width, with one more at either end for what lies outside.
class FineHistogram {
 public:
  static constexpr std::int64_t kBins = 8192;
  FineHistogram() = default;
  // Bins from mean - 12 sigma to mean + 12 sigma of a first guess: a bin is 0.003 sigma wide.
  FineHistogram(double mean, double sigma);

  void add(double x) {
    const double at = (x - lower_) * per_width_;
    const std::int64_t bin = at < 0        ? 0
                             : at >= kBins ? kBins + 1
                                           : static_cast<std::int64_t>(at) + 1;
    ++counts_[static_cast<std::size_t>(bin)];
  }
  void add(const FineHistogram& other);

  double ks(const CentralMoments& moments) const;  // distance to the normal of these moments
  std::vector<QuantilePair> quantiles(const CentralMoments& moments, std::int64_t points) const;
  Histogram coarse(std::int64_t bins) const;  // over the bins that are not empty

 private:
  double total() const;
  double edge(std::int64_t bin) const { return lower_ + static_cast<double>(bin) / per_width_; }

  double lower_ = 0, per_width_ = 1;
  std::vector<std::int64_t> counts_;  // [kBins + 2]
};

double normal_cdf(double z);
double normal_quantile(double probability);

}  // namespace lln::analysis
