// Attention matrices of all kinds: rows against the definition, products against the rows.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <numeric>

#include "expect_error.h"
#include "instruments_data.h"
#include "math/half.h"

namespace lln::test {
namespace {

constexpr std::array kAllKinds = {"softmax",    "lln",       "elu",         "relu",
                                  "softplus",   "power2",    "quadratic",   "diag16",
                                  "lln+diag16", "elu+diag7", "performer32", "linear"};

void expect_near_rows(const std::vector<double>& found, const std::vector<double>& expected,
                      double tolerance) {
  ASSERT_EQ(found.size(), expected.size());
  double worst = 0;
  for (std::size_t i = 0; i < found.size(); ++i) {
    worst = std::max(worst, std::abs(found[i] - expected[i]));
  }
  EXPECT_LT(worst, tolerance);
}

TEST(InstrumentsMatrix, RowsAreThoseOfTheDefinition) {
  const GaussianHead x(150, 12, 1.2);
  for (const char* kind : {"softmax", "lln", "elu", "relu", "softplus", "power2", "quadratic",
                           "diag16", "diag200", "lln+diag16", "elu+diag7"}) {
    for (const bool causal : {false, true}) {
      SCOPED_TRACE(std::string(kind) + (causal ? " causal" : ""));
      AttentionMatrix m = x.matrix(kind);
      m.causal = causal;
      if (m.feature == Feature::exp) m.alpha = 1.7, m.beta = 1.3;
      expect_near_rows(all_rows(m), plain_matrix(x, m), 1e-13);
    }
  }
}

TEST(InstrumentsMatrix, LinearIsSignedAndNotNormalised) {
  const GaussianHead x(40, 6, 1);
  const std::vector<double> p = all_rows(x.matrix("linear"));
  double dot = 0;
  for (std::size_t l = 0; l < 6; ++l) dot += static_cast<double>(x.q[7 * 6 + l]) * x.k[9 * 6 + l];
  EXPECT_NEAR(p[7 * 40 + 9], dot / (40 * std::sqrt(6.0)), 1e-15);
}

// Random features: the kernel e^(q.k/sqrt(dim)) in the mean, and the same for the same seed.
TEST(InstrumentsMatrix, PerformerApproachesSoftmax) {
  const GaussianHead x(40, 16, 0.5);
  AttentionMatrix m = x.matrix("performer4096");
  const std::vector<double> few = all_rows(m), softmax = all_rows(x.matrix("softmax"));
  double error = 0;  // mean of the rows' total variation distances
  for (std::size_t i = 0; i < few.size(); ++i) error += std::abs(few[i] - softmax[i]) / 2 / 40;
  EXPECT_LT(error, 0.04);
  EXPECT_EQ(all_rows(m), few);
  m.seed = 1;
  EXPECT_NE(all_rows(m), few);
}

TEST(InstrumentsMatrix, ProductsAreThoseOfTheRows) {
  const std::int64_t n = 200, count = 3;
  const GaussianHead x(n, 12, 1);
  std::vector<double> in(static_cast<std::size_t>(n * count)), out(in.size());
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = normal_number(9, i);
  for (const char* kind : kAllKinds) {
    for (const bool causal : {false, true}) {
      SCOPED_TRACE(std::string(kind) + (causal ? " causal" : ""));
      AttentionMatrix m = x.matrix(kind);
      m.causal = causal;
      const std::vector<double> p = all_rows(m);
      for (const bool transposed : {false, true}) {
        std::vector<double> expected(in.size());
        for (std::int64_t v = 0; v < count; ++v) {
          for (std::int64_t i = 0; i < n; ++i) {
            for (std::int64_t j = 0; j < n; ++j) {
              const double weight = p[static_cast<std::size_t>(i * n + j)];
              const std::int64_t to = transposed ? j : i, from = transposed ? i : j;
              expected[static_cast<std::size_t>(v * n + to)] +=
                  weight * in[static_cast<std::size_t>(v * n + from)];
            }
          }
        }
        (transposed ? matrix_apply_transposed : matrix_apply)(m, in, out, {});
        expect_near_rows(out, expected, 1e-12);
      }
    }
  }
}

TEST(InstrumentsMatrix, ThreadsChangeNoBit) {
  const GaussianHead x(300, 12, 1);
  ThreadPool pool(3);
  const Exec threads{.parallel = &pool};
  for (const char* kind : kAllKinds) {
    SCOPED_TRACE(kind);
    const AttentionMatrix m = x.matrix(kind);
    EXPECT_EQ(all_rows(m), all_rows(m, threads));
    const Examination one = examine(m), many = examine(m, {}, threads);
    EXPECT_EQ(one.rows.entropy.mean, many.rows.entropy.mean);
    EXPECT_EQ(one.rows.log->variance, many.rows.log->variance);
    EXPECT_EQ(one.rows.column_entropy, many.rows.column_entropy);
    EXPECT_EQ(one.spectrum->eigenvalues, many.spectrum->eigenvalues);
    ASSERT_EQ(one.chain.has_value(), many.chain.has_value());
    if (one.chain) {
      EXPECT_EQ(one.chain->stationary, many.chain->stationary);
    }
  }
}

// exp(beta k) alone would overflow f64 here.
TEST(InstrumentsMatrix, HugeKeysDoNotOverflow) {
  GaussianHead x(100, 8, 1);
  for (float& k : x.k) k *= 200;
  AttentionMatrix m = x.matrix("lln");
  m.alpha = m.beta = 2;
  for (const bool causal : {false, true}) {
    m.causal = causal;
    expect_near_rows(all_rows(m), plain_matrix(x, m), 1e-12);
  }
  m.causal = false;
  const Examination found = examine(m);
  EXPECT_TRUE(std::isfinite(found.rows.entropy.mean));
  EXPECT_TRUE(std::isfinite(found.rows.log->variance));
  EXPECT_GT(found.rows.log->zeros, 0);  // weights below the range of f64
}

TEST(InstrumentsMatrix, EveryDtypeAndLayout) {
  const GaussianHead x(90, 10, 1);
  const std::vector<double> expected = all_rows(x.matrix("lln"));
  std::vector<double> q64(x.q.begin(), x.q.end()), k64(x.k.begin(), x.k.end());
  AttentionMatrix m = x.matrix("lln");
  m.q = view(static_cast<const void*>(q64.data()), DType::f64, {1, 1, 90, 10});
  m.k = view(static_cast<const void*>(k64.data()), DType::f64, {1, 1, 90, 10});
  EXPECT_EQ(all_rows(m), expected);
  for (const DType dtype : {DType::f16, DType::bf16}) {
    std::vector<std::uint16_t> q16, k16;
    const auto round = dtype == DType::f16 ? f16_from_f32 : bf16_from_f32;
    for (const float value : x.q) q16.push_back(round(value));
    for (const float value : x.k) k16.push_back(round(value));
    m.q = view(static_cast<const void*>(q16.data()), dtype, {1, 1, 90, 10});
    m.k = view(static_cast<const void*>(k16.data()), dtype, {1, 1, 90, 10});
    expect_near_rows(all_rows(m), expected, 0.01);
  }
  // Two heads side by side: [1, token, head, channel] in memory.
  std::vector<float> both;
  for (std::size_t i = 0; i < 90; ++i) {
    both.insert(both.end(), &x.q[i * 10], &x.q[i * 10] + 10);
    both.insert(both.end(), &x.k[i * 10], &x.k[i * 10] + 10);
  }
  const ConstView heads =
      view(static_cast<const void*>(both.data()), DType::f32, {1, 2, 90, 10}, {1800, 10, 20, 1});
  m.q = head_view(heads, 0, 0);
  m.k = head_view(heads, 0, 1);
  EXPECT_EQ(all_rows(m), expected);
}

TEST(InstrumentsMatrix, NamesAreReadAndWritten) {
  for (const char* text : {"softmax", "lln", "lln+diag64", "diag32", "elu", "relu", "softplus",
                           "power2", "power3+diag8", "quadratic", "performer256", "linear"}) {
    AttentionMatrix m;
    parse_matrix(text, m);
    EXPECT_EQ(to_string(m), text);
  }
  AttentionMatrix m;
  parse_matrix("performer", m);
  EXPECT_EQ(m.features, 256);
  for (const char* text : {"", "exp", "lln+", "lln+diag", "lln+diag0", "diag-1", "performer0",
                           "performerx", "softmax+diag64", "gelu"}) {
    expect_error([&] { parse_matrix(text, m); },
                 {"unknown kind of attention '" + std::string(text) + "'", "quadratic"});
  }
}

TEST(InstrumentsMatrix, OneErrorNamesEveryFault) {
  const GaussianHead x(20, 4, 1), other(21, 4, 1);
  AttentionMatrix m = x.matrix("lln+diag8");
  m.k = other.matrix("lln").k;
  m.mix = 2;
  m.diag_block = 0;
  m.alpha = std::nan("");
  InstrumentOptions options;
  options.bins = 0;
  options.tolerance = 0;
  expect_error([&] { examine(m, options); },
               {"k has shape [1, 1, 21, 4]: expected [1, 1, 20, 4]", "mix is 2: expected 0 to 1",
                "diag_block is 0", "alpha is nan", "bins is 0", "tolerance is 0", "6 faults"});

  GaussianHead bad = x;
  bad.q[5] = std::numeric_limits<float>::quiet_NaN();
  expect_error([&] { examine(bad.matrix("softmax")); }, {"q holds an infinity, NaN"});
  expect_error([&] { examine(AttentionMatrix{}); }, {"q is not given", "k is not given"});

  std::vector<double> numbers(19), out(20);
  expect_error([&] { matrix_apply(x.matrix("lln"), numbers, out); },
               {"x has 19 numbers: expected one or more vectors of 20", "y has 20 numbers"});
  expect_error([&] { matrix_rows(x.matrix("lln"), 15, 6, out); }, {"rows 15 to 21"});
}

TEST(InstrumentsMatrix, GivenMatrixMustBeStochastic) {
  std::vector<double> p = {0.5, 0.5, -0.1, 1.1};
  AttentionMatrix m;
  m.kind = MatrixKind::given;
  m.p = view(static_cast<const void*>(p.data()), DType::f64, {1, 1, 2, 2});
  expect_error([&] { examine(m); }, {"p[0, 0, 1, 0] is -0.1: expected a probability"});
  p = {0.5, 0.5, 0.7, 0.7};
  expect_error([&] { examine(m); }, {"row 1 of p sums to 1.4: expected 1"});
  p = {0.5, 0.5, 0.5, 0.5};
  m.causal = true;
  expect_error([&] { examine(m); }, {"p[0, 0, 0, 1] is 0.5: expected 0 above the diagonal"});
}

TEST(InstrumentsMatrix, ProgressIsToldAndCancels) {
  const GaussianHead x(300, 8, 1);
  InstrumentOptions options;
  std::vector<std::string> stages;
  options.progress = [&](const InstrumentProgress& p) {
    EXPECT_LE(p.done, p.total);
    if (stages.empty() || stages.back() != p.stage) stages.emplace_back(p.stage);
  };
  examine(x.matrix("softmax"), options);
  EXPECT_EQ(stages, (std::vector<std::string>{"rows", "spectrum", "stationary", "mixing", "norm"}));
  options.progress = [](const InstrumentProgress& p) {
    if (p.stage == "spectrum" && p.done == 5) throw std::runtime_error("enough");
  };
  EXPECT_THROW(examine(x.matrix("softmax"), options), std::runtime_error);
}

}  // namespace
}  // namespace lln::test
