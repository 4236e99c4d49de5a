// Attentions whose weights come from no pair of tokens, fnet and synthesizer, against their
// definitions.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <complex>
#include <numbers>

#include "tests/torch/zoo_definition.h"

namespace lln_torch::definition {
namespace {

// Re sum over tokens j and channels c of x_jc exp(-2 pi i (j m / n + c d / dim)).
Case fnet_case(bool orthonormal) {
  return {.config = small("fnet"),
          .options = orthonormal ? "norm = \"ortho\"" : "",
          .definition = [=](const Values&, const Rows& x) {
            const std::size_t n = x.size(), dim = x[0].size();
            Rows y(n, Row(dim, 0));
            for (std::size_t m = 0; m < n; ++m) {
              for (std::size_t d = 0; d < dim; ++d) {
                for (std::size_t j = 0; j < n; ++j) {
                  for (std::size_t c = 0; c < dim; ++c) {
                    const double turns = static_cast<double>(j * m) / static_cast<double>(n) +
                                         static_cast<double>(c * d) / static_cast<double>(dim);
                    y[m][d] += x[j][c] * std::cos(2 * std::numbers::pi * turns);
                  }
                }
                if (orthonormal) y[m][d] /= std::sqrt(static_cast<double>(n * dim));
              }
            }
            return y;
          }};
}

TEST(Fnet, IsItsDefinition) {
  check(fnet_case(false));
  check(fnet_case(true));
  Case one = fnet_case(false);
  one.tokens = 1;
  one.config.max_tokens = 1;
  check_outputs(one);
}

// The mask of a sequence with a hole is that of the sequence without it.
TEST(Fnet, TokensThatDoNotCountAreLeftOut) {
  const auto module = make(fnet_case(false));
  at::manual_seed(5);
  const Tensor x = at::randn({1, 9, 12});
  Tensor mask = at::ones({1, 9}, at::kBool);
  mask[0][3] = false;
  const Tensor rest = at::cat({x.narrow(1, 0, 3), x.narrow(1, 4, 5)}, 1);
  const Tensor o = run(*module, x, mask), expected = run(*module, rest, {});
  EXPECT_LT(distance(o.narrow(1, 0, 3), expected.narrow(1, 0, 3)), 1e-4);
  EXPECT_LT(distance(o.narrow(1, 4, 5), expected.narrow(1, 3, 5)), 1e-4);
}

// Long sequences: phases j^2 / n would be wrong by whole turns in f32.
TEST(Fnet, PaddedLongSequencesKeepTheirPhases) {
  Case c = fnet_case(true);
  const auto module = make(c);
  at::manual_seed(5);
  const std::int64_t n = 30011;
  const Tensor x = at::randn({1, n, 12});
  const Tensor longer = at::constant_pad_nd(x, {0, 0, 0, 1000}, 3);
  const Tensor mask = at::arange(n + 1000).lt(n).unsqueeze(0);
  EXPECT_LT(distance(run(*module, longer, mask).narrow(1, 0, n), run(*module, x, {})), 1e-4);
}

Case synthesizer_case(const std::string& kind, bool causal) {
  return {.config = small("synthesizer", causal),
          .options = fmt::format("kind = \"{}\"", kind),
          .definition = [=](const Values& values, const Rows& x) {
            const Rows v = linear(values, "value", x);
            std::vector<Rows> parts;
            for (std::int64_t h = 0; h < 2; ++h) {
              Rows scores;
              if (kind == "random") {
                scores = rows_of(values.at("scores")[h]);
              } else {
                Rows hidden = head_of(linear(values, "hidden", x), h, 2);
                for (Row& row : hidden) {
                  for (double& value : row) value = std::max(value, 0.0);
                }
                scores = product(hidden, rows_of(values.at("score_weight")[h]));
                const Row bias = rows_of(values.at("score_bias")[h])[0];
                for (Row& row : scores) {
                  for (std::size_t j = 0; j < row.size(); ++j) row[j] += bias[j];
                }
              }
              Rows o;
              for (std::size_t i = 0; i < x.size(); ++i) {
                Row seen = scores[i];
                seen.resize(causal ? i + 1 : x.size());
                Rows seen_values = head_of(v, h, 2);
                seen_values.resize(seen.size());
                o.push_back(mean_by(softmax(seen), seen_values));
              }
              parts.push_back(o);
            }
            return linear(values, "output", merged(parts));
          }};
}

TEST(Synthesizer, IsItsDefinition) {
  check(synthesizer_case("random", false));
  check(synthesizer_case("dense", false));
}

TEST(Synthesizer, CausalFormIsItsDefinition) {
  check(synthesizer_case("random", true));
  check(synthesizer_case("dense", true));
}

struct Seen : Observer {
  std::vector<Observation> all;
  void observe(const Observation& observation) override { all.push_back(observation); }
};

TEST(Mixing, ObservationsHaveNoQueriesAndKeys) {
  for (const char* name : {"fnet", "synthesizer"}) {
    AttentionConfig config = small(name);
    config.layer = 4;
    Seen seen;
    Context context{.observer = &seen};
    make_attention(config, Settings())->forward(at::randn({1, 5, 12}), {}, context);
    ASSERT_EQ(seen.all.size(), 1u);
    EXPECT_EQ(seen.all[0].layer, 4);
    EXPECT_EQ(seen.all[0].name, name);
    EXPECT_FALSE(seen.all[0].q.defined());
  }
}

}  // namespace
}  // namespace lln_torch::definition
