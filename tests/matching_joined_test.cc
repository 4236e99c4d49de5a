// Moments that are taken of pieces of a sequence and joined give the alpha and beta of the whole.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <limits>
#include <vector>

#include "conformance/data.h"
#include "expect_error.h"
#include "lln/lln.h"

namespace lln {
namespace {

using conformance::Tensor;

constexpr Shape kShapeQ = {2, 4, 100, 16}, kShapeK = {2, 2, 100, 16};

Tensor normal_tensor(std::uint64_t seed, const Shape& shape) {
  Tensor x(DType::f32, shape);
  std::uint64_t index = 0;
  x.for_each([&](auto b, auto h, auto n, auto c) {
    x.set(b, h, n, c, 1 + 0.8 * conformance::normal_number(seed, index++));
  });
  return x;
}

// Moments of the tokens from `begin` on, `count` of them.
std::vector<Moments> moments_of_piece(const Tensor& x, std::int64_t begin, std::int64_t count) {
  ConstView piece = x.view();
  piece.data = static_cast<const float*>(piece.data) + begin * piece.stride[2];
  piece.shape[2] = count;
  std::vector<Moments> moments(static_cast<std::size_t>(piece.shape[0] * piece.shape[1]));
  head_moments({.x = piece}, moments);
  return moments;
}

std::vector<Moments> joined(const Tensor& x) {
  std::vector<Moments> all(static_cast<std::size_t>(x.shape()[0] * x.shape()[1]));
  for (const auto& [begin, count] : {std::pair{0, 33}, {33, 0}, {33, 66}, {99, 1}}) {
    const std::vector<Moments> piece = moments_of_piece(x, begin, count);
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = merge(all[i], piece[i]);
  }
  return all;
}

struct JoinedMomentsTest : testing::Test {
  Tensor q = normal_tensor(1, kShapeQ), k = normal_tensor(2, kShapeK);
  std::vector<Moments> of_q = joined(q), of_k = joined(k);
  Tensor alpha{DType::f32, {2, 4, 1, 1}}, beta{DType::f32, {2, 2, 1, 1}};
  MatchingOutputs out{alpha.view(), beta.view()};
  JoinedMoments moments{.heads = 4, .heads_k = 2, .dim = 16, .q = of_q, .k = of_k};
};

TEST_F(JoinedMomentsTest, GiveTheScalesOfTheWhole) {
  for (const Matching mode :
       {Matching::none, Matching::paper, Matching::per_head, Matching::exact, Matching::entropy}) {
    SCOPED_TRACE(to_string(mode));
    Tensor whole_alpha(DType::f32, {2, 4, 1, 1}), whole_beta(DType::f32, {2, 2, 1, 1});
    match_moments({.q = q.view(), .k = k.view()}, {whole_alpha.view(), whole_beta.view()},
                  {.mode = mode});
    match_moments(moments, out, {.mode = mode});
    alpha.for_each([&](auto s, auto h, auto n, auto c) {
      EXPECT_FLOAT_EQ(alpha.get(s, h, n, c), whole_alpha.get(s, h, n, c));
    });
    beta.for_each([&](auto s, auto h, auto n, auto c) {
      EXPECT_FLOAT_EQ(beta.get(s, h, n, c), whole_beta.get(s, h, n, c));
    });
  }
}

TEST_F(JoinedMomentsTest, UpdateRunningMomentsAsTheWholeDoes) {
  RunningMoments whole, running;
  for (int step = 0; step < 2; ++step) {
    update_moments(whole, {.q = q.view(), .k = k.view()});
    update_moments(running, moments);
  }
  ASSERT_EQ(running.q.size(), 2U);
  for (std::size_t h = 0; h < 2; ++h) {
    EXPECT_NEAR(running.q[h].variance, whole.q[h].variance, 1e-12);
    EXPECT_NEAR(running.k[h].mean, whole.k[h].mean, 1e-12);
    EXPECT_EQ(running.k[h].weight, whole.k[h].weight);
  }
}

TEST_F(JoinedMomentsTest, OneErrorNamesEveryFault) {
  const auto expect = [&](const std::vector<std::string>& texts, const MatchingOptions& options) {
    test::expect_error([&] { match_moments(moments, out, options); }, texts,
                       ErrorCode::invalid_argument);
    for (const std::byte byte : alpha.bytes()) ASSERT_EQ(byte, std::byte{0xFF});
  };
  expect({"mode ema takes no moments of the call"}, {.mode = Matching::ema});
  expect({"mode per_head reads the whole sequence", "matches the exponential feature map"},
         {.causal = true, .feature = Feature::relu});
  moments.q = moments.q.first(7);
  expect({"7 moments of q and 4 of k: expected 4 and 2 for each sequence"}, {});
  moments.heads = 3;
  expect({"dim is 16, heads 3, heads_k 2"}, {});
  moments = {.heads = 4, .heads_k = 2, .dim = 16, .q = of_q, .k = of_k};
  of_k[3].mean = std::numeric_limits<double>::infinity();
  expect({"k holds an infinity or NaN in a token that counts: sequence 1, head 1"}, {});
}

}  // namespace
}  // namespace lln
