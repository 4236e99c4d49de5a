// Moment matching at work, for lln demo.
// SPDX-License-Identifier: Apache-2.0
#include "demo_concentration.h"

#include <fmt/format.h>

#include <array>
#include <nlohmann/json.hpp>

#include "conformance/data.h"
#include "log_weights.h"
#include "tasks.h"

namespace lln::cli {
namespace {

constexpr std::array kSigmas = {0.6, 0.8, 1.0, 1.2};
constexpr std::int64_t kSamples = 4;  // of each sigma; one alone scatters by a tenth
constexpr std::int64_t kTokens = 512;
constexpr std::int64_t kDim = 64;
constexpr std::int64_t kSequences = kSamples * kSigmas.size();
constexpr Shape kShape = {kSequences, 1, kTokens, kDim};

std::vector<float> gaussian(std::uint64_t seed, Parallel& parallel) {
  constexpr std::int64_t kSize = kTokens * kDim;
  std::vector<float> x(kSequences * kSize);
  for_each_task(parallel, kSequences, [&](std::int64_t s) {
    const double sigma = kSigmas[static_cast<std::size_t>(s / kSamples)];
    for (std::int64_t i = s * kSize; i < (s + 1) * kSize; ++i) {
      x[static_cast<std::size_t>(i)] = static_cast<float>(
          sigma * conformance::normal_number(seed, static_cast<std::uint64_t>(i)));
    }
  });
  return x;
}

}  // namespace

std::vector<ConcentrationRow> measure_concentration(Parallel& parallel) {
  const std::vector<float> q = gaussian(1, parallel), k = gaussian(2, parallel);
  std::vector<float> alpha(kSequences), beta(kSequences);
  const float one = 1;
  AttentionInputs in{.q = view(q.data(), kShape), .k = view(k.data(), kShape)};
  LogWeights log_weights(kSequences, kTokens);
  const std::vector<Moments> of_q = sequence_moments(in.q, parallel),
                             of_k = sequence_moments(in.k, parallel),
                             softmax = log_weights.moments(in, Kind::softmax, parallel);
  in.alpha = in.beta = scalar(&one);
  const std::vector<Moments> unmatched = log_weights.moments(in, Kind::lln, parallel);
  const Shape scales = {kSequences, 1, 1, 1};
  match_moments({.q = in.q, .k = in.k}, {view(alpha.data(), scales), view(beta.data(), scales)},
                {.mode = Matching::per_head}, {.parallel = &parallel});
  in.alpha = view(static_cast<const float*>(alpha.data()), scales);
  in.beta = view(static_cast<const float*>(beta.data()), scales);
  const std::vector<Moments> matched = log_weights.moments(in, Kind::lln, parallel);

  std::vector<ConcentrationRow> rows;
  for (std::size_t s = 0; s < kSequences; ++s) {
    if (s % kSamples == 0) rows.push_back({.sigma = kSigmas[s / kSamples]});
    ConcentrationRow& row = rows.back();
    row.alpha += alpha[s] / kSamples;
    row.target += of_q[s].variance() * of_k[s].variance() / kSamples;
    row.softmax += softmax[s].variance() / kSamples;
    row.matched += matched[s].variance() / kSamples;
    row.unmatched += unmatched[s].variance() / kSamples;
  }
  return rows;
}

std::string to_text(const std::vector<ConcentrationRow>& rows) {
  std::string text = fmt::format(
      "Moment matching: alpha and beta such that LLN is as concentrated as softmax. Var(ln P) on\n"
      "Gaussian q and k, {} tokens, {} channels, scales by mode per_head, mean of {} samples.\n\n"
      "    sigma    alpha    target   softmax       LLN   LLN with alpha = beta = 1\n",
      kTokens, kDim, kSamples);
  for (const ConcentrationRow& row : rows) {
    text += fmt::format("  {:>7.1f} {:>8.2f} {:>9.2f} {:>9.2f} {:>9.2f} {:>27.3f}\n", row.sigma,
                        row.alpha, row.target, row.softmax, row.matched, row.unmatched);
  }
  return text + "\n  target        sigma_q^2 sigma_k^2, what matching aims at\n";
}

Json to_json(const std::vector<ConcentrationRow>& rows) {
  Json list = Json::array();
  for (const ConcentrationRow& row : rows) {
    list.push_back({{"sigma", row.sigma},
                    {"alpha", row.alpha},
                    {"target", row.target},
                    {"softmax", row.softmax},
                    {"lln", row.matched},
                    {"lln_unmatched", row.unmatched}});
  }
  return {{"tokens", kTokens}, {"dim", kDim}, {"samples", kSamples}, {"rows", list}};
}

}  // namespace lln::cli
