// The measure of concentration that lln fit uses, against the weights that the library's kernels
// give.
// SPDX-License-Identifier: Apache-2.0
#include "concentration.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "lln/attention.h"
#include "lln/moments.h"

namespace lln::cli {
namespace {

// All weights of one head of 256 tokens, P row by row.
std::vector<float> weights(const Tokens& q, const Tokens& k, float alpha, float beta, Kind kind) {
  using LibraryRows = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const LibraryRows of_q = q, of_k = k, identity = LibraryRows::Identity(256, 256);
  const Shape shape{1, 1, 256, q.cols()}, square{1, 1, 256, 256};
  std::vector<float> p(256 * 256);
  AttentionInputs in{.q = view(of_q.data(), shape),
                     .k = view(of_k.data(), shape),
                     .v = view(identity.data(), square)};
  if (kind == Kind::lln) {
    in.alpha = scalar(&alpha);
    in.beta = scalar(&beta);
  }
  attention_forward(in, {.o = view(p.data(), square)}, {.kind = kind});
  return p;
}

Concentration expected(const std::vector<float>& p) {
  Moments logs;
  double entropy = 0;
  for (const float x : p) {
    logs = merge(logs, {1, std::log(x), 0});
    entropy -= static_cast<double>(x) * std::log(x) / 256;
  }
  return {logs.variance(), entropy};
}

TEST(ConcentrationTest, IsThatOfTheKernels) {
  const Tokens q = normal_tokens(1, 256, 24), k = normal_tokens(2, 256, 24);
  for (const float scale : {0.5F, 2.0F, 4.0F}) {
    const Concentration lln = lln_concentration(q, k, scale, 1.25 * scale);
    const Concentration plain = expected(weights(q, k, scale, 1.25F * scale, Kind::lln));
    // The rows count as a sample here: the part between rows is 256/255 times as large.
    EXPECT_NEAR(lln.log_variance, plain.log_variance, 0.004 * plain.log_variance);
    EXPECT_NEAR(lln.entropy, plain.entropy, 1e-4);
  }
  for (const float scale : {0.5F, 1.0F, 3.0F}) {
    const Concentration plain = expected(weights(scale * q, k, 0, 0, Kind::softmax));
    EXPECT_NEAR(SoftmaxScores(q, k).entropy(scale), plain.entropy, 1e-4);
  }
}

TEST(ConcentrationTest, NumbersAreNormalAndReproducible) {
  const Tokens x = normal_tokens(7, 1001, 101);
  EXPECT_EQ(x, normal_tokens(7, 1001, 101));
  EXPECT_NE(x, normal_tokens(8, 1001, 101));
  const double count = 1001 * 101;
  const auto numbers = x.cast<double>().array();
  const double mean = numbers.sum() / count, variance = numbers.square().sum() / count;
  EXPECT_NEAR(mean, 0, 5 / std::sqrt(count));
  EXPECT_NEAR(variance, 1, 5 * std::sqrt(2 / count));
  EXPECT_NEAR(numbers.pow(4).sum() / count, 3, 5 * std::sqrt(96 / count));
  EXPECT_NEAR((numbers > 2).count() / count, 0.02275, 5 * std::sqrt(0.0222 / count));
}

}  // namespace
}  // namespace lln::cli
