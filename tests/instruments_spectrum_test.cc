// Spectrum, chain and verdict: against dense eigenvalues and matrices whose answers are known.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <Eigen/Dense>
#include <numeric>

#include "expect_error.h"
#include "instruments_data.h"

namespace lln::test {
namespace {

// Dense eigenvalues are slow under sanitizers.
#ifdef LLN_QUICK_TESTS
constexpr std::int64_t kTokens = 100;
#else
constexpr std::int64_t kTokens = 512;
#endif

using DenseMatrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// Moduli of all eigenvalues of a matrix [n, n], falling.
std::vector<double> dense_moduli(const std::vector<double>& p, std::int64_t n) {
  const Eigen::Map<const DenseMatrix> matrix(p.data(), n, n);
  const Eigen::VectorXcd values = Eigen::EigenSolver<Eigen::MatrixXd>(matrix, false).eigenvalues();
  std::vector<double> moduli;
  for (const std::complex<double>& value : values) moduli.push_back(std::abs(value));
  std::sort(moduli.begin(), moduli.end(), std::greater<>());
  return moduli;
}

// A row-stochastic matrix and the view of it.
struct Given {
  explicit Given(std::int64_t tokens) : n(tokens), p(static_cast<std::size_t>(n * n)) {}
  double& at(std::int64_t i, std::int64_t j) { return p[static_cast<std::size_t>(i * n + j)]; }
  AttentionMatrix matrix() const {
    AttentionMatrix m;
    m.kind = MatrixKind::given;
    m.p = view(static_cast<const void*>(p.data()), DType::f64, {1, 1, n, n});
    return m;
  }
  std::int64_t n;
  std::vector<double> p;
};

Given uniform(std::int64_t n) {
  Given g(n);
  std::fill(g.p.begin(), g.p.end(), 1 / static_cast<double>(n));
  return g;
}

// A cycle through all tokens in an order that is not theirs.
Given permutation(std::int64_t n) {
  Given g(n);
  for (std::int64_t i = 0; i < n; ++i) g.at(i, (i + 7) % n) = 1;
  return g;
}

// All rows the same, nine tenths of them on one key.
Given rank_one(std::int64_t n) {
  Given g(n);
  for (std::int64_t i = 0; i < n; ++i) {
    for (std::int64_t j = 0; j < n; ++j)
      g.at(i, j) = j == 3 ? 0.9 : 0.1 / static_cast<double>(n - 1);
  }
  return g;
}

TEST(InstrumentsSpectrum, FeaturesEqualDenseEigenvalues) {
  const GaussianHead x(kTokens, 64, 1);
  for (const char* kind : {"lln", "elu", "relu", "softplus", "power2", "performer"}) {
    SCOPED_TRACE(kind);
    const AttentionMatrix m = std::string_view(kind) == "lln" ? x.matched(kind) : x.matrix(kind);
    const Spectrum found = spectrum(m);
    const std::vector<double> expected = dense_moduli(all_rows(m), x.n);
    EXPECT_EQ(found.method, SpectrumMethod::features);
    EXPECT_NEAR(found.gap, 1 - expected[1], 1e-10);
    for (std::size_t i = 0; i < found.eigenvalues.size(); ++i) {
      EXPECT_NEAR(std::abs(found.eigenvalues[i]), expected[i], 1e-10) << i;
    }
  }
}

TEST(InstrumentsSpectrum, SignedGapIsOfTheRatio) {
  const GaussianHead x(200, 16, 1);
  const AttentionMatrix m = x.matrix("linear");
  const Spectrum found = spectrum(m);
  const std::vector<double> expected = dense_moduli(all_rows(m), x.n);
  EXPECT_TRUE(found.is_signed);
  EXPECT_NEAR(found.gap, 1 - expected[1] / expected[0], 1e-10);
  const Examination all = examine(m);
  EXPECT_FALSE(all.chain);
  EXPECT_GT(all.rows.entropy.mean, 0);
  EXPECT_LT(all.rows.entropy.mean, std::log(200));
  expect_error([&] { chain_statistics(m, found); }, {"weights are signed"});
}

TEST(InstrumentsSpectrum, ArnoldiEqualsDenseEigenvalues) {
  const GaussianHead x(400, 32, 1.2);
  InstrumentOptions options;
  options.tolerance = 1e-9;
  options.max_applications = 4000;
  for (const char* kind : {"softmax", "quadratic", "lln+diag64"}) {
    SCOPED_TRACE(kind);
    const AttentionMatrix m = x.matrix(kind);
    const std::vector<double> expected = dense_moduli(plain_matrix(x, m), x.n);
    const Spectrum exact = spectrum(m, options), quick = spectrum(m);
    EXPECT_EQ(exact.method, SpectrumMethod::arnoldi);
    EXPECT_TRUE(exact.converged);
    EXPECT_GE(exact.applications, quick.applications);
    EXPECT_NEAR(exact.lambda_2, expected[1], 1e-8);
    EXPECT_TRUE(quick.converged);
    EXPECT_NEAR(quick.lambda_2, expected[1], 0.01 * expected[1]);
    EXPECT_LE(quick.residual, 0.02 * quick.lambda_2);
  }
}

TEST(InstrumentsSpectrum, ArnoldiSaysWhenItDidNotConverge) {
  const GaussianHead x(400, 32, 1.2);
  InstrumentOptions options;
  options.tolerance = 1e-12;
  options.max_applications = 1;
  const Spectrum found = spectrum(x.matrix("softmax"), options);
  EXPECT_FALSE(found.converged);
  EXPECT_GT(found.residual, 1e-12 * found.lambda_2);
  EXPECT_NEAR(found.lambda_2, dense_moduli(plain_matrix(x, x.matrix("softmax")), x.n)[1], 0.02);
}

TEST(InstrumentsSpectrum, BlocksNeverMix) {
  const GaussianHead x(130, 8, 1);
  const Examination found = examine(x.matrix("diag64"));
  EXPECT_EQ(found.spectrum->method, SpectrumMethod::blocks);
  EXPECT_EQ(found.spectrum->gap, 0);
  EXPECT_EQ(found.spectrum->eigenvalues.size(), 3U);  // one for each block
  EXPECT_TRUE(std::isinf(found.chain->mixing_time_from_gap));
  EXPECT_FALSE(found.chain->mixing_time);
  EXPECT_EQ(*found.verdict, Verdict::unbiased);
}

TEST(InstrumentsSpectrum, VerdictsOfMatricesThatAreKnown) {
  // 60: dense eigenvalues; 600: Arnoldi.
  for (const std::int64_t n : {60, 600}) {
    SCOPED_TRACE(n);
    const Examination biased = examine(rank_one(n).matrix());
    EXPECT_EQ(*biased.verdict, Verdict::biased);
    EXPECT_NEAR(biased.spectrum->gap, 1, 1e-6);
    EXPECT_EQ(biased.chain->mixing_time, 1);
    EXPECT_NEAR(*biased.effective_rank, 1, 1e-6);

    const Examination unbiased = examine(permutation(n).matrix());
    EXPECT_EQ(*unbiased.verdict, Verdict::unbiased);
    EXPECT_LT(unbiased.spectrum->gap, 0.02);
    EXPECT_EQ(unbiased.rows.entropy.max, 0);
    EXPECT_NEAR(unbiased.rows.column_entropy, std::log(n), 1e-9);
    EXPECT_NEAR(*unbiased.effective_rank, static_cast<double>(n), 1e-6);
    EXPECT_FALSE(unbiased.temperature);  // nothing is colder, and no variance says so

    const Examination diffuse = examine(uniform(n).matrix());
    EXPECT_EQ(*diffuse.verdict, Verdict::diffuse);
    EXPECT_NEAR(diffuse.spectrum->gap, 1, 1e-6);
    EXPECT_NEAR(diffuse.rows.entropy.mean, std::log(n), 1e-9);
    EXPECT_EQ(diffuse.rows.log->variance, 0);
    EXPECT_EQ(diffuse.rows.log->ks, 0);
    EXPECT_TRUE(std::isinf(*diffuse.temperature));
  }
}

TEST(InstrumentsSpectrum, CausalIsRefusedWithTheReason) {
  const GaussianHead x(100, 8, 1);
  for (const char* kind : {"softmax", "lln", "lln+diag16", "diag16", "linear"}) {
    SCOPED_TRACE(kind);
    AttentionMatrix m = x.matrix(kind);
    m.causal = true;
    expect_error([&] { spectrum(m); },
                 {"eigenvalues are its diagonal", "entropy against position is given instead"});
    expect_error([&] { chain_statistics(m, {}); }, {"eigenvalues are its diagonal"});
    const Examination found = examine(m);
    EXPECT_FALSE(found.spectrum);
    EXPECT_FALSE(found.verdict);
    EXPECT_NE(found.why_no_spectrum.find("diagonal"), std::string::npos);
    ASSERT_EQ(found.rows.by_position.size(), 64U);
    EXPECT_EQ(found.rows.by_position.front().first, 0);
    EXPECT_EQ(found.rows.by_position.back().last, 99);
    EXPECT_EQ(found.rows.by_position.front().mean, 0);  // the first row sees one key
  }
}

// pi = pi P, and rows of P^t near it after so many steps.
TEST(InstrumentsSpectrum, ChainOfTwoStatesIsKnown) {
  Given g(2);
  g.p = {0.9, 0.1, 0.3, 0.7};  // lambda_2 = 0.6, pi = (3/4, 1/4)
  const Examination found = examine(g.matrix());
  EXPECT_NEAR(found.spectrum->lambda_2, 0.6, 1e-12);
  ASSERT_EQ(found.chain->stationary.size(), 2U);
  EXPECT_NEAR(found.chain->stationary[0], 0.75, 1e-8);
  EXPECT_NEAR(found.chain->stationary_entropy, -0.75 * std::log(0.75) - 0.25 * std::log(0.25),
              1e-7);
  EXPECT_TRUE(found.chain->stationary_converged);
  // From the second state the distance is 0.75 * 0.6^t: 0.45, 0.27, 0.162.
  EXPECT_EQ(found.chain->mixing_time, 3);
  EXPECT_NEAR(found.chain->distance.at(1), 0.27, 1e-7);
  EXPECT_EQ(found.chain->mixing_time_from_gap, 3);  // 0.6^3 = 0.216
  const Eigen::Map<const DenseMatrix> dense(g.p.data(), 2, 2);
  const double norm = Eigen::JacobiSVD<Eigen::MatrixXd>(dense).singularValues()[0];
  EXPECT_NEAR(found.chain->spectral_norm, norm, 1e-5);
  EXPECT_NEAR(*found.effective_rank, dense.squaredNorm() / (norm * norm), 1e-4);
}

TEST(InstrumentsSpectrum, StationaryDistributionIsOfP) {
  const GaussianHead x(400, 16, 1.2);
  for (const char* kind : {"softmax", "lln", "lln+diag64", "performer"}) {
    SCOPED_TRACE(kind);
    const AttentionMatrix m = x.matrix(kind);
    const Examination found = examine(m);
    std::vector<double> next(400);
    matrix_apply_transposed(m, found.chain->stationary, next);
    double change = 0, sum = 0;
    for (std::size_t i = 0; i < 400; ++i) {
      change += std::abs(next[i] - found.chain->stationary[i]);
      sum += next[i];
    }
    EXPECT_LT(change, 1e-8);
    EXPECT_NEAR(sum, 1, 1e-9);
  }
}

// A row of zeros is no distribution: 1 is no eigenvalue, and the vector of ones none of its
// vectors.
TEST(InstrumentsSpectrum, RowsWithoutWeightsAreRefusedWithTheReason) {
  const std::int64_t d = 8;
  for (const std::int64_t n : {100, 300}) {  // dense, Arnoldi
    for (const char* kind : {"quadratic", "linear"}) {
      SCOPED_TRACE(std::string(kind) + " of " + std::to_string(n));
      GaussianHead x(n, d, 1);
      const AttentionMatrix m = x.matrix(kind);
      EXPECT_TRUE(examine(m).spectrum);
      std::fill_n(x.q.begin() + 90 * d, d, 0.0F);
      std::fill_n(x.q.begin() + 70 * d, d, 0.0F);
      InstrumentOptions few;  // rows that miss the empty ones
      few.rows = 2;
      ThreadPool pool(3);
      for (const Exec& exec : {Exec{}, Exec{.parallel = &pool}}) {
        const Examination found = examine(m, few, exec);
        EXPECT_FALSE(found.spectrum);
        EXPECT_FALSE(found.chain);
        EXPECT_FALSE(found.verdict);
        EXPECT_NE(found.why_no_spectrum.find("row 70 has no weights"), std::string::npos)
            << found.why_no_spectrum;
      }
      expect_error([&] { spectrum(m); }, {"row 70 has no weights"});
      expect_error([&] { chain_statistics(m, {}); }, {"row 70 has no weights"});
    }
  }
  // Queries that see the first half of the channels, keys that fill the second.
  GaussianHead x(100, d, 1);
  for (std::size_t i = 0; i < x.q.size(); ++i) (i % 8 < 4 ? x.k : x.q)[i] = 0;
  for (const char* kind : {"quadratic", "linear"}) {
    expect_error([&] { spectrum(x.matrix(kind)); }, {"row 0 has no weights"});
  }
}

TEST(InstrumentsSpectrum, ChainIsAnOption) {
  const GaussianHead x(100, 8, 1);
  InstrumentOptions options;
  options.chain = false;
  options.progress = [](const InstrumentProgress& now) { EXPECT_EQ(now.stage, "rows"); };
  const Examination found = examine(x.matrix("softmax"), options);
  EXPECT_FALSE(found.chain);
  EXPECT_FALSE(found.effective_rank);
  EXPECT_TRUE(found.verdict);
}

// |P|_2 of all singular values; those of Diag's blocks lie close together.
TEST(InstrumentsSpectrum, EffectiveRankIsThatOfAllSingularValues) {
  const GaussianHead x(256, 16, 1);
  for (const char* kind : {"diag64", "diag16", "lln+diag64", "softmax", "lln"}) {
    SCOPED_TRACE(kind);
    const AttentionMatrix m = x.matrix(kind);
    const std::vector<double> p = all_rows(m);
    const Eigen::Map<const DenseMatrix> dense(p.data(), 256, 256);
    const double squares = Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd>(dense.transpose() * dense)
                               .eigenvalues()[255];
    EXPECT_NEAR(*examine(m).effective_rank * squares / dense.squaredNorm(), 1, 1e-6);
  }
}

// One key for each row: nothing is colder, although the weights that are left are equal.
TEST(InstrumentsSpectrum, ColdestIsNotHottest) {
  GaussianHead x(64, 8, 1e4);
  for (const char* kind : {"lln", "diag16"}) {
    SCOPED_TRACE(kind);
    const Examination found = examine(x.matrix(kind));
    EXPECT_LT(found.rows.entropy.mean, 0.1);
    if (found.temperature) {
      EXPECT_LT(*found.temperature, 0.1);
    }
  }
  EXPECT_FALSE(examine(x.matrix("lln")).temperature);
  std::fill(x.q.begin(), x.q.end(), 0.0F);
  EXPECT_TRUE(std::isinf(*examine(x.matrix("softmax")).temperature));
}

// k falls as q rises and both have means: sigma_q^2 sigma_k^2 + c_cross is negative and no
// variance.
TEST(InstrumentsSpectrum, NoPredictionFromANegativeVariance) {
  GaussianHead x(200, 8, 0.5);
  for (std::size_t i = 0; i < x.q.size(); ++i) {
    x.k[i] = 1 - x.q[i];
    x.q[i] += 1;
  }
  const Examination softmax = examine(x.matrix("softmax"));
  ASSERT_LT(softmax.inputs->target(), 0);
  EXPECT_FALSE(softmax.temperature);
  EXPECT_FALSE(softmax.theory.log_variance);
  EXPECT_FALSE(softmax.theory.log_mean);
  EXPECT_FALSE(softmax.theory.entropy);
  EXPECT_FALSE(softmax.theory.variance);
  EXPECT_FALSE(softmax.theory.lambda_2);

  const GaussianHead small(200, 64, 0.1);  // t = 0.02, where the line is below zero
  const Examination lln = examine(small.matrix("lln"));
  ASSERT_LT(matching_constants(64).a * lln.theory.t + matching_constants(64).b, 0);
  EXPECT_FALSE(lln.theory.log_variance);
  EXPECT_FALSE(lln.theory.entropy);
  EXPECT_TRUE(lln.theory.lambda_2);
  EXPECT_TRUE(lln.theory.fenton_wilkinson);
}

// Features below the constant that is added to them leave the constant to be seen.
TEST(InstrumentsSpectrum, PerformerOfConstantsIsNotJudged) {
  const GaussianHead usual(256, 64, 1), cold(256, 64, 4);
  const Examination seen = examine(usual.matrix("performer"));
  EXPECT_GT(*seen.floored_features, 0.01);
  EXPECT_LT(*seen.floored_features, 0.06);  // Phi((4 + ln 1e-4) / sqrt 8) = 0.033
  EXPECT_TRUE(seen.verdict);
  const Examination unseen = examine(cold.matrix("performer"));
  EXPECT_GT(*unseen.floored_features, 0.99);
  EXPECT_FALSE(unseen.verdict);
  EXPECT_FALSE(examine(usual.matrix("softmax")).floored_features);
}

}  // namespace
}  // namespace lln::test
