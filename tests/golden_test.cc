// Every kernel against the printed outputs of the paper's authors.
// SPDX-License-Identifier: Apache-2.0
#include <gtest/gtest.h>

#include <array>
#include <string>

#include "golden/notebook.h"
#include "lln/lln.h"

namespace lln {
namespace {

constexpr Shape kShape = {1, 2, 4, 3};
constexpr float kFourDecimals = 6e-5F;  // half a unit of the last printed digit, and f32 rounding

class Golden : public testing::TestWithParam<bool> {};

TEST_P(Golden, EveryKernelMatches) {
  const bool causal = GetParam();
  const auto& expected = causal ? golden::kCausal : golden::kBidirectional;
  std::array<float, 24> o{};
  AttentionInputs in;
  in.q = view(golden::kQ.data(), kShape);
  in.k = view(golden::kK.data(), kShape);
  in.v = view(golden::kV.data(), kShape);
  in.alpha = scalar(&golden::kAlpha);
  in.beta = scalar(&golden::kBeta);
  AttentionOutputs out;
  out.o = view(o.data(), kShape);
  const AttentionOptions options{.kind = Kind::lln_diag, .diag_block = 3, .causal = causal};
  const Problem problem = make_problem(in, out, options);
  for (const auto& candidate : explain(problem).candidates) {
    if (!candidate.refusal.empty()) continue;
    o.fill(0);
    attention_forward(in, out, options, {.kernel = candidate.kernel});
    for (std::size_t i = 0; i < o.size(); ++i) {
      EXPECT_NEAR(o[i], expected[i], kFourDecimals) << candidate.kernel << ", element " << i;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Masks, Golden, testing::Bool(), [](const auto& named) {
  return std::string(named.param ? "causal" : "bidirectional");
});

}  // namespace
}  // namespace lln
