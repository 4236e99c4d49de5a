// Findings as JSON: one flat object for each head and kind, whose names are part of the program's
// interface (docs/cli.md). Numbers are means over the samples; pictures are of the first one.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numbers>

#include "report/findings.h"

namespace lln::report {
namespace {

using Samples = std::vector<Examination>;

// Mean over the samples of of(sample), a number or an optional one; nothing where one has none.
template <class Of>
std::optional<double> mean(const Samples& samples, Of of) {
  double sum = 0;
  for (const Examination& sample : samples) {
    const std::optional<double> value = of(sample);
    if (!value) return std::nullopt;
    sum += *value;
  }
  return sum / static_cast<double>(samples.size());
}

// Standard deviation of the samples; nothing for one alone.
template <class Of>
std::optional<double> deviation(const Samples& samples, Of of) {
  const std::optional<double> centre = mean(samples, of);
  if (!centre || samples.size() < 2) return std::nullopt;
  double sum = 0;
  for (const Examination& sample : samples) {
    const double distance = *std::optional<double>(of(sample)) - *centre;
    sum += distance * distance;
  }
  return std::sqrt(sum / static_cast<double>(samples.size() - 1));
}

// JSON has neither infinities nor NaN.
Json number(const std::optional<double>& value) {
  return value && std::isfinite(*value) ? Json(*value) : Json();
}

// A few digits are enough for what is only drawn.
Json rounded(double value) {
  if (!std::isfinite(value)) return {};
  if (value == 0) return 0.0;
  const double unit = std::pow(10.0, 4 - std::floor(std::log10(std::abs(value))));
  return std::round(value * unit) / unit;
}

double entropy_of(const Examination& e) { return e.rows.entropy.mean; }
std::optional<double> gap_of(const Examination& e) {
  return e.spectrum ? std::optional(e.spectrum->gap) : std::nullopt;
}
std::optional<double> lambda_2_of(const Examination& e) {
  return e.spectrum ? std::optional(e.spectrum->lambda_2) : std::nullopt;
}

// A number of the part `log`, which causal matrices do not have.
template <class Member>
auto of_log(Member LogNormality::*member) {
  return [member](const Examination& e) {
    return e.rows.log ? std::optional<double>((*e.rows.log).*member) : std::nullopt;
  };
}

template <class Member>
auto of_chain(Member ChainStatistics::*member) {
  return [member](const Examination& e) {
    return e.chain ? std::optional<double>((*e.chain).*member) : std::nullopt;
  };
}

auto of_inputs(Distribution InputStatistics::*input, double Distribution::*member) {
  return [input, member](const Examination& e) {
    return e.inputs ? std::optional<double>((*e.inputs).*input.*member) : std::nullopt;
  };
}

std::optional<double> input_temperature(const Samples& samples) {
  return mean(samples, [](const Examination& e) -> std::optional<double> {
    if (!e.inputs || !(e.inputs->target() > 0)) return std::nullopt;
    return 1 / std::sqrt(e.inputs->target());
  });
}

Json prediction(const Samples& samples, std::optional<Prediction> Theory::*member) {
  const auto part = [&](double Prediction::*of) {
    return mean(samples, [&](const Examination& e) -> std::optional<double> {
      if (!(e.theory.*member)) return std::nullopt;
      return *(e.theory.*member).*of;
    });
  };
  const std::optional<double> predicted = part(&Prediction::predicted),
                              measured = part(&Prediction::measured);
  if (!predicted || !measured) return {};
  return {{"predicted", number(predicted)},
          {"measured", number(measured)},
          {"error", number(*predicted - *measured)}};
}

Json theory_json(const Samples& samples) {
  Json json = Json::object();
  const std::optional<double> t =
      mean(samples, [](const Examination& e) -> std::optional<double> { return e.theory.t; });
  if (t && *t > 0) json["t"] = *t;
  const std::pair<const char*, std::optional<Prediction> Theory::*> parts[] = {
      {"log_mean", &Theory::log_mean}, {"log_variance", &Theory::log_variance},
      {"entropy", &Theory::entropy},   {"p_variance", &Theory::variance},
      {"lambda_2", &Theory::lambda_2}, {"fenton_wilkinson", &Theory::fenton_wilkinson}};
  for (const auto& [name, member] : parts) {
    if (Json value = prediction(samples, member); !value.is_null()) json[name] = value;
  }
  if (json.contains("t")) {
    const MatchingConstants line = matching_constants(samples.front().dim);
    json["line"] = {{"a", line.a}, {"b", line.b}};
  }
  return json;
}

Json distribution_json(const Samples& samples, Distribution InputStatistics::*input) {
  return {
      {"mean", number(mean(samples, of_inputs(input, &Distribution::mean)))},
      {"skew", number(mean(samples, of_inputs(input, &Distribution::skewness)))},
      {"excess_kurtosis", number(mean(samples, of_inputs(input, &Distribution::excess_kurtosis)))},
      {"ks", number(mean(samples, of_inputs(input, &Distribution::ks)))}};
}

Json entropy_json(const Samples& samples) {
  const std::pair<const char*, double EntropyStatistics::*> parts[] = {
      {"standard_error", &EntropyStatistics::standard_error},
      {"min", &EntropyStatistics::min},
      {"p05", &EntropyStatistics::p05},
      {"p25", &EntropyStatistics::p25},
      {"p50", &EntropyStatistics::p50},
      {"p75", &EntropyStatistics::p75},
      {"p95", &EntropyStatistics::p95},
      {"max", &EntropyStatistics::max}};
  std::int64_t empty = 0;
  for (const Examination& sample : samples) empty += sample.rows.empty_rows;
  Json json = {{"rows", samples.front().rows.entropy.rows}, {"empty_rows", empty}};
  for (const auto& [name, member] : parts) {
    json[name] = number(mean(samples, [&, m = member](const Examination& e) {
      return std::optional<double>(e.rows.entropy.*m);
    }));
  }
  return json;
}

// Of all samples: the worst residual, and converged only where every one is.
Json spectrum_json(const Samples& samples) {
  const auto without = std::find_if(samples.begin(), samples.end(),
                                    [](const Examination& e) { return !e.spectrum; });
  if (without != samples.end()) return {{"refused", without->why_no_spectrum}};
  const Examination& first = samples.front();
  bool converged = true;
  std::int64_t applications = 0;
  double residual = 0;
  for (const Examination& sample : samples) {
    converged = converged && sample.spectrum->converged;
    applications += sample.spectrum->applications;
    residual = std::max(residual, sample.spectrum->residual);
  }
  return {{"method", to_string(first.spectrum->method)},
          {"converged", converged},
          {"applications", applications},
          {"residual", number(residual)},
          {"signed", first.spectrum->is_signed}};
}

Json chain_json(const Samples& samples) {
  const bool measured = std::all_of(samples.begin(), samples.end(), [](const Examination& e) {
    return e.chain && e.chain->mixing_time;
  });
  bool converged = true;
  double residual = 0;
  for (const Examination& sample : samples) {
    converged = converged && sample.chain && sample.chain->stationary_converged;
    if (sample.chain) residual = std::max(residual, sample.chain->stationary_residual);
  }
  return {
      {"stationary_converged", converged},
      {"stationary_residual", number(residual)},
      {"stationary_entropy", number(mean(samples, of_chain(&ChainStatistics::stationary_entropy)))},
      {"mixing_time_from_gap",
       number(mean(samples, of_chain(&ChainStatistics::mixing_time_from_gap)))},
      {"mixing_time", measured ? number(mean(samples,
                                             [](const Examination& e) {
                                               return std::optional<double>(
                                                   static_cast<double>(*e.chain->mixing_time));
                                             }))
                               : Json()}};
}

// What a figure shows, of the first sample.
void add_pictures(const Examination& first, Json& json) {
  if (first.rows.log) {
    const LogNormality& log = *first.rows.log;
    Json share = Json::array(), qq = Json::array();
    for (const double s : log.histogram.share) share.push_back(rounded(s));
    for (const QuantilePair& p : log.qq) {
      qq.push_back(Json::array({rounded(p.normal), rounded(p.measured)}));
    }
    json["histogram"] = {{"lower", rounded(log.histogram.lower)},
                         {"upper", rounded(log.histogram.upper)},
                         {"share", share}};
    json["qq"] = qq;
  }
  if (first.spectrum) {
    Json moduli = Json::array();
    for (const std::complex<double>& value : first.spectrum->eigenvalues) {
      moduli.push_back(rounded(std::abs(value)));
    }
    json["eigenvalues"] = moduli;
  }
  if (!first.rows.by_position.empty()) {
    Json positions = Json::array();
    for (const PositionEntropy& p : first.rows.by_position) {
      positions.push_back({{"first", p.first},
                           {"last", p.last},
                           {"entropy_nats", rounded(p.mean)},
                           {"limit", rounded(p.limit)}});
    }
    json["by_position"] = positions;
  }
}

std::optional<Verdict> verdict(const Samples& samples) {
  const std::optional<double> lambda_2 = mean(samples, lambda_2_of);
  const bool all = std::all_of(samples.begin(), samples.end(),
                               [](const Examination& e) { return e.verdict.has_value(); });
  if (!lambda_2 || !all) return std::nullopt;
  return concentration_verdict(*mean(samples, entropy_of), *lambda_2, samples.front().tokens);
}

Json head_json(const HeadFinding& finding) {
  const Samples& samples = finding.samples;
  const Examination& first = samples.front();
  Json json = {{"layer", finding.layer ? Json(*finding.layer) : Json()},
               {"head", finding.head ? Json(*finding.head) : Json()},
               {"kind", finding.kind},
               {"n", first.tokens},
               {"d", first.dim}};
  json["sigma_q"] = number(mean(samples, of_inputs(&InputStatistics::q, &Distribution::sigma)));
  json["sigma_k"] = number(mean(samples, of_inputs(&InputStatistics::k, &Distribution::sigma)));
  json["alpha"] = finding.matching ? Json(finding.alpha) : Json();
  json["beta"] = finding.matching ? Json(finding.beta) : Json();
  json["temperature"] = number(mean(samples, [](const Examination& e) { return e.temperature; }));
  const double entropy = *mean(samples, entropy_of);
  json["entropy_nats"] = entropy;
  json["entropy_bits"] = entropy / std::numbers::ln2;
  json["spectral_gap"] = number(mean(samples, gap_of));
  json["log_mean"] = number(mean(samples, of_log(&LogNormality::mean)));
  json["log_var"] = number(mean(samples, of_log(&LogNormality::variance)));
  json["ks"] = number(mean(samples, of_log(&LogNormality::ks)));
  json["skew"] = number(mean(samples, of_log(&LogNormality::skewness)));
  json["theory"] = theory_json(samples);
  const std::optional<Verdict> found = verdict(samples);
  json["verdict"] = found ? Json(to_string(*found)) : Json();
  json["matching"] = finding.matching ? Json(to_string(*finding.matching)) : Json();
  json["clamped"] = finding.matching ? Json(finding.clamped) : Json();
  json["samples"] = samples.size();
  json["input_temperature"] = number(input_temperature(samples));
  json["entropy_deviation"] = number(deviation(samples, entropy_of));
  json["gap_deviation"] = number(deviation(samples, gap_of));
  return json;
}

}  // namespace

Json to_brief_json(const HeadFinding& finding) { return head_json(finding); }

Json to_json(const HeadFinding& finding) {
  const Samples& samples = finding.samples;
  const Examination& first = samples.front();
  Json json = head_json(finding);
  json["layer_name"] = finding.layer_name;
  json["lambda_2"] = number(mean(samples, lambda_2_of));
  json["entropy"] = entropy_json(samples);
  json["spectrum"] = spectrum_json(samples);
  const std::optional<double> floored =
      mean(samples, [](const Examination& e) { return e.floored_features; });
  if (floored) json["floored_features"] = *floored;
  if (first.chain) json["chain"] = chain_json(samples);
  json["column_entropy"] = number(mean(
      samples, [](const Examination& e) { return std::optional<double>(e.rows.column_entropy); }));
  json["p_variance"] = number(
      mean(samples, [](const Examination& e) { return std::optional<double>(e.rows.variance); }));
  Json top = Json::array();
  for (std::size_t i = 0; i < first.rows.top.size(); ++i) {
    top.push_back(
        {{"k", first.rows.top[i].k}, {"mass", number(mean(samples, [i](const Examination& e) {
                                        return std::optional<double>(e.rows.top[i].mass);
                                      }))}});
  }
  json["top_mass"] = top;
  json["effective_rank"] =
      number(mean(samples, [](const Examination& e) { return e.effective_rank; }));
  json["log_excess_kurtosis"] = number(mean(samples, of_log(&LogNormality::excess_kurtosis)));
  json["zeros"] = number(mean(samples, of_log(&LogNormality::zeros)));
  if (first.inputs) {
    json["q"] = distribution_json(samples, &InputStatistics::q);
    json["k"] = distribution_json(samples, &InputStatistics::k);
    json["c_cross"] = number(mean(
        samples, [](const Examination& e) { return std::optional<double>(e.inputs->c_cross); }));
  }
  add_pictures(first, json);
  return json;
}

}  // namespace lln::report
