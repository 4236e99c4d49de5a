// Statistics of rows against sums over the whole matrix, and the statistics of inputs.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <algorithm>
#include <numeric>

#include "instruments_data.h"

namespace lln::test {
namespace {

struct PlainMoments {
  explicit PlainMoments(const std::vector<double>& x) {
    const auto n = static_cast<double>(x.size());
    mean = std::accumulate(x.begin(), x.end(), 0.0) / n;
    double m3 = 0, m4 = 0;
    for (const double value : x) {
      const double d = value - mean;
      variance += d * d / n;
      m3 += d * d * d / n;
      m4 += d * d * d * d / n;
    }
    skewness = m3 / std::pow(variance, 1.5);
    excess_kurtosis = m4 / (variance * variance) - 3;
  }
  double mean = 0, variance = 0, skewness = 0, excess_kurtosis = 0;
};

double plain_ks(std::vector<double> x) {
  const PlainMoments moments(x);
  std::sort(x.begin(), x.end());
  double distance = 0;
  const auto n = static_cast<double>(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    const double z = (x[i] - moments.mean) / std::sqrt(2 * moments.variance);
    const double expected = 0.5 * std::erfc(-z);
    distance = std::max({distance, std::abs(expected - static_cast<double>(i) / n),
                         std::abs(expected - static_cast<double>(i + 1) / n)});
  }
  return distance;
}

TEST(InstrumentsRows, EqualPlainSums) {
  const std::int64_t n = 300;
  const GaussianHead x(n, 16, 1.3);
  InstrumentOptions options;
  options.top_k = {1, 5, 1000};
  for (const char* kind : {"softmax", "lln", "quadratic", "lln+diag64", "performer"}) {
    SCOPED_TRACE(kind);
    const AttentionMatrix m = x.matrix(kind);
    const std::vector<double> p = all_rows(m);
    const RowStatistics found = row_statistics(m, options);
    std::vector<double> log_p, entropy, columns(n);
    double top1 = 0, top5 = 0, squares = 0;
    for (std::int64_t i = 0; i < n; ++i) {
      std::vector<double> row(p.begin() + i * n, p.begin() + (i + 1) * n);
      double h = 0;
      for (std::size_t j = 0; j < row.size(); ++j) {
        log_p.push_back(std::log(row[j]));
        h -= row[j] * std::log(row[j]);
        columns[j] += row[j] / static_cast<double>(n);
        squares += row[j] * row[j];
      }
      entropy.push_back(h);
      std::sort(row.begin(), row.end(), std::greater<>());
      top1 += row[0] / static_cast<double>(n);
      top5 += std::accumulate(row.begin(), row.begin() + 5, 0.0) / static_cast<double>(n);
    }
    const PlainMoments logs(log_p), rows(entropy), entries(p);
    EXPECT_NEAR(found.entropy.mean, rows.mean, 1e-11);
    EXPECT_EQ(found.entropy.rows, n);
    EXPECT_EQ(found.entropy.standard_error, 0);
    EXPECT_NEAR(found.entropy.min, *std::min_element(entropy.begin(), entropy.end()), 1e-11);
    EXPECT_NEAR(found.entropy.max, *std::max_element(entropy.begin(), entropy.end()), 1e-11);
    std::sort(entropy.begin(), entropy.end());
    EXPECT_NEAR(found.entropy.p50, (entropy[149] + entropy[150]) / 2, 1e-11);
    EXPECT_NEAR(found.log->mean, logs.mean, 1e-10);
    EXPECT_NEAR(found.log->variance, logs.variance, 1e-9);
    EXPECT_NEAR(found.log->skewness, logs.skewness, 1e-8);
    EXPECT_NEAR(found.log->excess_kurtosis, logs.excess_kurtosis, 1e-7);
    EXPECT_NEAR(found.log->ks, plain_ks(log_p), 2e-3);
    EXPECT_NEAR(found.variance, entries.variance, 1e-12);
    EXPECT_NEAR(found.squares, squares / static_cast<double>(n), 1e-12);
    ASSERT_EQ(found.top.size(), 3U);
    EXPECT_NEAR(found.top[0].mass, top1, 1e-12);
    EXPECT_NEAR(found.top[1].mass, top5, 1e-12);
    EXPECT_EQ(found.top[2].k, n);  // no more keys than there are
    EXPECT_NEAR(found.top[2].mass, 1, 1e-12);
    double column_entropy = 0;
    for (const double c : columns) column_entropy -= c * std::log(c);
    EXPECT_NEAR(found.column_entropy, column_entropy, 1e-10);
    const std::vector<double>& share = found.log->histogram.share;
    EXPECT_NEAR(std::accumulate(share.begin(), share.end(), 0.0), 1, 1e-9);
    ASSERT_EQ(found.log->qq.size(), 99U);
    std::sort(log_p.begin(), log_p.end());
    const double median = (log_p[log_p.size() / 2] - logs.mean) / std::sqrt(logs.variance);
    EXPECT_NEAR(found.log->qq[49].normal, 0, 1e-12);
    EXPECT_NEAR(found.log->qq[49].measured, median, 4e-3);
  }
}

// Weights before their rows are normalised: ln A of LLN, entry by entry.
TEST(InstrumentsRows, UnnormalisedVariance) {
  const GaussianHead x(200, 16, 1);
  for (const char* kind : {"lln", "softmax", "quadratic"}) {
    const AttentionMatrix m = x.matrix(kind);
    std::vector<double> log_a;
    for (std::int64_t i = 0; i < x.n; ++i) {
      for (std::int64_t j = 0; j < x.n; ++j) log_a.push_back(log_weight(x, m, i, j));
    }
    EXPECT_NEAR(row_statistics(m).log->unnormalised_variance, PlainMoments(log_a).variance, 1e-9);
  }
}

TEST(InstrumentsRows, SampledRowsEstimateAll) {
  const GaussianHead x(2000, 16, 1);
  const AttentionMatrix m = x.matrix("softmax");
  const RowStatistics all = row_statistics(m);
  double squared_error = 0, claimed = 0;
  const int trials = 12;
  for (int i = 0; i < trials; ++i) {
    InstrumentOptions options;
    options.rows = 100;
    options.seed = static_cast<std::uint64_t>(i);
    const RowStatistics some = row_statistics(m, options);
    EXPECT_EQ(some.entropy.rows, 100);
    EXPECT_NEAR(some.log->variance, all.log->variance, 0.1);
    squared_error += std::pow(some.entropy.mean - all.entropy.mean, 2) / trials;
    claimed += std::pow(some.entropy.standard_error, 2) / trials;
  }
  EXPECT_GT(squared_error, claimed / 4);
  EXPECT_LT(squared_error, claimed * 4);
}

TEST(InstrumentsRows, EntropyAgainstPosition) {
  const GaussianHead x(256, 16, 1);
  AttentionMatrix m = x.matrix("lln");
  m.causal = true;
  InstrumentOptions options;
  options.positions = 8;
  const RowStatistics found = row_statistics(m, options);
  EXPECT_FALSE(found.log);
  ASSERT_EQ(found.by_position.size(), 8U);
  const std::vector<double> p = all_rows(m);
  double mean = 0, limit = 0;  // of the last 32 rows
  for (std::size_t i = 224; i < 256; ++i) {
    limit += std::log(static_cast<double>(i + 1)) / 32;
    for (std::size_t j = 0; j <= i; ++j) mean -= p[i * 256 + j] * std::log(p[i * 256 + j]) / 32;
  }
  EXPECT_EQ(found.by_position[7].first, 224);
  EXPECT_EQ(found.by_position[7].last, 255);
  EXPECT_NEAR(found.by_position[7].mean, mean, 1e-10);
  EXPECT_NEAR(found.by_position[7].limit, limit, 1e-12);
}

TEST(InstrumentsRows, InputsOfAGaussian) {
  const GaussianHead x(4096, 32, 1.5);
  const AttentionMatrix m = x.matrix("softmax");
  const InputStatistics found = input_statistics(m.q, m.k);
  for (const Distribution& d : {found.q, found.k}) {
    EXPECT_NEAR(d.mean, 0, 0.02);
    EXPECT_NEAR(d.sigma, 1.5, 0.02);
    EXPECT_NEAR(d.skewness, 0, 0.03);
    EXPECT_NEAR(d.excess_kurtosis, 0, 0.06);
    EXPECT_LT(d.ks, 0.01);
  }
  EXPECT_NEAR(found.covariance, 0, 0.03);
  EXPECT_NEAR(found.c_cross, 0, 0.15);
  EXPECT_NEAR(found.target(), std::pow(1.5, 4), 0.3);
}

// q = k has Cov(q^2, k^2) = Var(q^2) and Cov(q, k) = Var(q); two values +-1 have neither tails.
TEST(InstrumentsRows, InputsThatAreNotGaussian) {
  GaussianHead x(1000, 8, 1);
  x.k = x.q;
  AttentionMatrix m = x.matrix("softmax");
  double squares = 0, fourth = 0;
  for (const float v : x.q) {
    squares += std::pow(v, 2) / 8000;
    fourth += std::pow(v, 4) / 8000;
  }
  const InputStatistics same = input_statistics(m.q, m.k);
  const double variance = same.q.sigma * same.q.sigma;
  EXPECT_NEAR(same.covariance, variance, 1e-3);
  EXPECT_NEAR(same.c_cross, fourth - squares * squares - variance * variance, 1e-3);
  for (float& v : x.q) v = v > 0 ? 1.0F : -1.0F;
  const InputStatistics two = input_statistics(m.q, m.k);
  EXPECT_NEAR(two.q.excess_kurtosis, -2, 0.01);
  EXPECT_NEAR(two.q.ks, 0.34, 0.02);  // half of the mass at one sigma
}

// Padding: every other query is zero. What is left is measured as if the others were not there.
TEST(InstrumentsRows, RowsWithoutWeightsAreCountedAndLeftOut) {
  const std::int64_t n = 300, d = 16;
  GaussianHead x(n, d, 1);
  for (std::int64_t i = 0; i < n; i += 2) {
    std::fill_n(x.q.begin() + i * d, d, 0.0F);
  }
  for (const char* kind : {"quadratic", "linear"}) {
    for (const bool causal : {false, true}) {
      SCOPED_TRACE(std::string(kind) + (causal ? " causal" : ""));
      AttentionMatrix m = x.matrix(kind);
      m.causal = causal;
      const std::vector<double> p = all_rows(m);
      double entropy = 0, least = 10, top1 = 0, squares = 0;
      std::vector<double> columns(n), log_p;
      for (std::int64_t i = 1; i < n; i += 2) {
        std::vector<double> row(p.begin() + i * n, p.begin() + (i + 1) * n);
        for (double& weight : row) weight = std::abs(weight);
        const double sum = std::accumulate(row.begin(), row.end(), 0.0);
        double h = 0, largest = 0;
        for (std::size_t j = 0; j < row.size(); ++j) {
          const double share = row[j] / sum;
          columns[j] += share / 150;
          squares += share * share / 150;
          largest = std::max(largest, share);
          if (share == 0) continue;
          h -= share * std::log(share);
          log_p.push_back(std::log(share));
        }
        entropy += h / 150;
        least = std::min(least, h);
        top1 += largest / 150;
      }
      double column_entropy = 0;
      for (const double c : columns) column_entropy -= c > 0 ? c * std::log(c) : 0;
      const RowStatistics found = row_statistics(m);
      EXPECT_EQ(found.empty_rows, 150);
      EXPECT_EQ(found.entropy.rows, 150);
      EXPECT_EQ(found.entropy.standard_error, 0);
      EXPECT_NEAR(found.entropy.mean, entropy, 1e-11);
      EXPECT_NEAR(found.entropy.min, least, 1e-11);
      EXPECT_NEAR(found.top[0].mass, top1, 1e-12);
      EXPECT_NEAR(found.squares, squares, 1e-12);
      EXPECT_NEAR(found.column_entropy, column_entropy, 1e-10);
      if (causal) {
        EXPECT_EQ(found.by_position.front().first, 1);
      } else {
        EXPECT_EQ(found.log->zeros, 0);
        EXPECT_NEAR(found.log->variance, PlainMoments(log_p).variance, 1e-9);
        EXPECT_TRUE(std::isfinite(found.log->unnormalised_variance));
      }
    }
  }
  std::fill(x.q.begin(), x.q.end(), 0.0F);
  const Examination nothing = examine(x.matrix("quadratic"));
  EXPECT_EQ(nothing.rows.empty_rows, n);
  EXPECT_EQ(nothing.rows.entropy.rows, 0);
  EXPECT_FALSE(nothing.rows.log);
  EXPECT_FALSE(nothing.temperature);
}

// The rows by which the range of ln P is guessed are uniform, the others are not.
TEST(InstrumentsRows, BinsLieWhereTheWeightsAre) {
  const std::int64_t n = 256;
  std::vector<double> p(static_cast<std::size_t>(n * n)), log_p;
  for (std::int64_t i = 0; i < n; ++i) {
    double sum = 0;
    for (std::int64_t j = 0; j < n; ++j) {
      const auto at = static_cast<std::size_t>(i * n + j);
      sum += p[at] = i % 4 == 0 ? 1 : std::exp(normal_number(3, at));
    }
    for (std::int64_t j = 0; j < n; ++j) {
      const auto at = static_cast<std::size_t>(i * n + j);
      p[at] /= sum;
      log_p.push_back(std::log(p[at]));
    }
  }
  AttentionMatrix m;
  m.kind = MatrixKind::given;
  m.p = view(static_cast<const void*>(p.data()), DType::f64, {1, 1, n, n});
  const RowStatistics found = row_statistics(m);
  const PlainMoments plain(log_p);
  EXPECT_NEAR(found.log->variance, plain.variance, 1e-10);
  EXPECT_NEAR(found.log->ks, plain_ks(log_p), 2e-3);
  std::sort(log_p.begin(), log_p.end());
  const double tenth = (log_p[log_p.size() / 10] - plain.mean) / std::sqrt(plain.variance);
  EXPECT_NEAR(found.log->qq[9].measured, tenth, 4e-3);
}

// A mean of ten thousand sigmas takes no digits from the moments around it.
TEST(InstrumentsRows, InputsFarFromZero) {
  const std::int64_t n = 1000, d = 8;
  const GaussianHead x(n, d, 1);
  std::vector<double> q, k;
  for (std::size_t i = 0; i < x.q.size(); ++i) {
    q.push_back(1e4 + x.q[i]);
    k.push_back(-2e4 + 0.5 * x.q[i] + x.k[i]);
  }
  const auto of = [&](const std::vector<double>& numbers) {
    return view(static_cast<const void*>(numbers.data()), DType::f64, {1, 1, n, d});
  };
  const InputStatistics found = input_statistics(of(q), of(k));
  const PlainMoments plain(q);
  EXPECT_NEAR(found.q.mean, plain.mean, 1e-8);
  EXPECT_NEAR(found.q.skewness, plain.skewness, 1e-6);
  EXPECT_NEAR(found.q.excess_kurtosis, plain.excess_kurtosis, 1e-6);
  const PlainMoments of_k(k);
  long double covariance = 0, squares = 0;
  const long double q2 = plain.variance + static_cast<long double>(plain.mean) * plain.mean,
                    k2 = of_k.variance + static_cast<long double>(of_k.mean) * of_k.mean;
  for (std::size_t i = 0; i < q.size(); ++i) {
    const long double a = q[i], b = k[i];
    covariance += (a - plain.mean) * (b - of_k.mean) / 8000;
    squares += (a * a - q2) * (b * b - k2) / 8000;
  }
  EXPECT_NEAR(found.covariance, static_cast<double>(covariance), 1e-9);
  EXPECT_NEAR(found.c_cross / static_cast<double>(squares - covariance * covariance), 1, 1e-9);
}

}  // namespace
}  // namespace lln::test
