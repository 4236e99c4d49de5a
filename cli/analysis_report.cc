// Sweeps, and everything that a report holds in one object.
// SPDX-License-Identifier: Apache-2.0
#include "analysis_report.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <nlohmann/json.hpp>

#include "bench/machine.h"
#include "lln/version.h"

namespace lln::cli {
namespace {

// Geometric means of sigma_q and sigma_k: from attention that is nearly uniform to more
// concentrated than theory covers.
constexpr std::array kSweep = {0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.3, 1.4};
constexpr std::int64_t kSweepSeeds = 4;  // at most
constexpr std::array kModes = {Matching::none, Matching::paper, Matching::per_head, Matching::exact,
                               Matching::entropy};

void append(const LayerFindings& found, bool brief, Json& list) {
  for (const HeadFinding& head : found.heads) {
    list.push_back(brief ? report::to_brief_json(head) : report::to_json(head));
  }
}

}  // namespace

Json analyze_gaussian(const GaussianSpec& spec, const AnalysisRequest& request, const char* verb,
                      Parallel& threads, Progress& progress) {
  const GaussianInput input(spec, threads);
  Json list = Json::array();
  const LayerFindings found =
      analyze_layer({.q = input.q(), .k = input.k()}, request,
                    fmt::format("lln {}: Gaussian input", verb), threads, progress);
  warn_of_limits(found, "Gaussian input", progress);
  append(found, request.brief, list);
  return list;
}

Json sweep_temperature(const GaussianSpec& spec, const AnalysisRequest& request, const char* verb,
                       Parallel& threads, Progress& progress) {
  Json list = Json::array();
  GaussianSpec now = spec;
  now.seeds = std::min(spec.seeds, kSweepSeeds);
  const double ratio = std::sqrt(spec.sigma_q / spec.sigma_k);
  AnalysisRequest others = request, lln = request;
  others.brief = lln.brief = true;
  const auto in_every_mode = [](const KindRequest& kind) { return kind.name == "lln"; };
  std::erase_if(others.kinds, in_every_mode);
  std::erase_if(lln.kinds, std::not_fn(in_every_mode));
  for (const double sigma : kSweep) {
    now.sigma_q = sigma * ratio;
    now.sigma_k = sigma / ratio;
    const GaussianInput input(now, threads);
    const AnalysisLayer layer{.q = input.q(), .k = input.k()};
    const std::string where = fmt::format("lln {}: sigma {}", verb, sigma);
    append(analyze_layer(layer, others, where, threads, progress), true, list);
    for (const Matching mode : kModes) {
      lln.matching = mode;
      append(analyze_layer(layer, lln, where, threads, progress), true, list);
    }
  }
  return list;
}

ReportHeading gaussian_heading(const GaussianSpec& spec, const std::string& command) {
  const std::string sigma = spec.sigma_q == spec.sigma_k
                                ? fmt::format("{}", spec.sigma_q)
                                : fmt::format("{} and {}", spec.sigma_q, spec.sigma_k);
  return {
      "How attention concentrates on Gaussian input",
      "Entropy, spectral gap and log-normality of softmax, LLN and other attentions on the same "
      "random queries and keys.",
      {{"tokens", fmt::format("{}", spec.tokens)},
       {"channels", fmt::format("{}", spec.dim)},
       {"sigma of q and k", sigma},
       {"seeds", fmt::format("{}", spec.seeds)}},
      command};
}

Json report_data(const ReportHeading& heading, const Json& results, const Json& sweep,
                 const std::vector<CostRow>& cost, int threads) {
  Json facts = Json::array();
  for (const auto& [name, value] : heading.facts) facts.push_back(Json::array({name, value}));
  facts.push_back(Json::array({"machine", fmt::format("{}, {} thread{}", bench::cpu_name(), threads,
                                                      threads == 1 ? "" : "s")}));
  return {
      {"title", heading.title},
      {"lead", heading.lead},
      {"facts", facts},
      {"command", heading.command},
      {"version", build_info().version},
      {"results", results},
      {"sweep", sweep},
      {"cost",
       {{"heads", kCostHeads}, {"dim", kCostDim}, {"threads", threads}, {"rows", to_json(cost)}}}};
}

}  // namespace lln::cli
