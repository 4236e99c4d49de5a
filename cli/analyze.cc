// lln analyze: how attention concentrates on dumped queries and keys, or on Gaussian ones. A table,
// JSON, and a report to look at.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "analysis.h"
#include "analysis_report.h"
#include "cost.h"
#include "dump_file.h"
#include "gaussian_input.h"
#include "io/printable.h"
#include "lln/calibration.h"
#include "progress.h"
#include "report_page.h"
#include "verb.h"

namespace lln::cli {
namespace {

constexpr std::int64_t kCostTokens = 8192;  // longest input whose cost a report shows: some seconds

struct Request {
  DumpOptions dump;
  std::string gaussian;
  std::vector<std::string> kinds = {"softmax", "lln",       "lln+diag64", "elu",
                                    "relu",    "quadratic", "performer"};
  std::string matching;
  std::string calibration;
  bool causal = false;
  std::int64_t rows = 0;
  std::string report;
  int threads = 0;
  bool json = false;
};

AnalysisRequest analysis_of(const Request& request) {
  AnalysisRequest analysis{
      .kinds = parse_kinds(request.kinds), .causal = request.causal, .rows = request.rows};
  if (request.causal) analysis.matching = Matching::none;
  if (!request.matching.empty()) analysis.matching = parse_matching(request.matching);
  if (!request.calibration.empty()) {
    if (!request.matching.empty() && analysis.matching != Matching::frozen) {
      throw UsageError(fmt::format("--calibration gives alpha and beta, and so does --matching {}",
                                   request.matching));
    }
    analysis.matching = Matching::frozen;
  }
  if (request.causal && analysis.matching != Matching::none &&
      analysis.matching != Matching::frozen) {
    throw UsageError(
        fmt::format("--matching {} reads the whole sequence, so with --causal a row would depend "
                    "on its future: "
                    "use none or frozen",
                    request.matching));
  }
  return analysis;
}

void check(const Request& request, const AnalysisRequest& analysis) {
  const DumpOptions& dump = request.dump;
  if (!request.gaussian.empty()) {
    if (!dump.file.empty() || !dump.q_files.empty() || !dump.k_files.empty()) {
      throw UsageError("--gaussian makes its own q and k: leave out FILE, --q and --k");
    }
    if (!request.calibration.empty()) {
      throw UsageError("--calibration is of the layers of FILE, which --gaussian has not");
    }
    if (analysis.matching == Matching::frozen) {
      throw UsageError(
          "--matching frozen takes alpha and beta from FILE, which --gaussian has not");
    }
  }
  if (request.report.empty()) return;
  std::vector<std::string> inputs = input_paths(dump);
  inputs.push_back(request.calibration);
  check_output("--report", request.report, inputs);
}

struct Findings {
  Json results = Json::array();
  ReportHeading heading;
};

Findings analyze_dump(const Request& request, const AnalysisRequest& analysis,
                      const std::string& command, Parallel& threads, Progress& progress) {
  const std::unique_ptr<io::TensorSource> source = open_dump(request.dump);
  std::optional<Calibration> calibration;
  if (!request.calibration.empty()) calibration = load_calibration(request.calibration);
  const DumpFile file(*source, request.dump,
                      {.scales = analysis.matching == Matching::frozen && !calibration,
                       .equal_tokens = true,
                       .calibration = calibration ? &*calibration : nullptr});
  Findings found;
  std::int64_t sequences = 0, heads = 0, tokens = 0, dim = 0;
  for (std::size_t i = 0; i < file.layers().size(); ++i) {
    const std::string where =
        fmt::format("lln analyze: layer {} of {}", i + 1, file.layers().size());
    progress.stage(where + ", reading");
    const DumpLayer layer = file.read(i);
    const LayerFindings of_layer = analyze_layer({.index = static_cast<std::int64_t>(i),
                                                  .name = layer.name,
                                                  .q = layer.q.view,
                                                  .k = layer.k.view,
                                                  .alpha = layer.alpha.view,
                                                  .beta = layer.beta.view},
                                                 analysis, where, threads, progress);
    warn_of_limits(of_layer, fmt::format("layer {}", io::printable(layer.name)), progress);
    for (const HeadFinding& head : of_layer.heads) found.results.push_back(report::to_json(head));
    const Shape& shape = layer.q.view.shape;
    sequences = std::max(sequences, shape[0]);
    heads = std::max(heads, shape[1]);
    tokens = std::max(tokens, shape[2]);
    dim = std::max(dim, shape[3]);
  }
  found.heading = {
      fmt::format("How attention concentrates in {}",
                  std::filesystem::path(file.path()).filename().string()),
      "Entropy, spectral gap and log-normality of the attention of each head, with its own "
      "queries and keys, and of what could take its place.",
      {{"layers", fmt::format("{}", file.layers().size())},
       {"heads", fmt::format("{}", heads)},
       {"sequences", fmt::format("{}", sequences)},
       {"tokens", fmt::format("{}", tokens)},
       {"channels", fmt::format("{}", dim)}},
      command};
  return found;
}

std::string cell(const Json& entry, const char* name, int decimals) {
  const Json& value = entry.at(name);
  return value.is_number() ? fmt::format("{:.{}f}", value.get<double>(), decimals) : "-";
}

// Whether eigenvalues were iterated without end.
bool unconverged(const Json& entry) {
  const Json& spectrum = entry.at("spectrum");
  return spectrum.contains("converged") && !spectrum.at("converged").get<bool>();
}

// Where a layer begins, a line with its name; nothing where there is no model behind the data.
std::string layer_line(const Json& results, std::size_t i) {
  const Json& layer = results[i].at("layer");
  if (layer.is_null() || (i > 0 && results[i - 1].at("layer") == layer)) return "";
  const auto name = results[i].at("layer_name").get<std::string>();
  return fmt::format("layer {}{}\n", layer.get<int>(),
                     name.empty() ? "" : ", " + io::printable(name));
}

std::string head_cell(const Json& entry) {
  const Json& head = entry.at("head");
  return head.is_null() ? "" : fmt::format("{:>4}  ", head.get<int>());
}

// One line for each head and kind.
std::string table(const Json& results) {
  std::string text =
      fmt::format("{}{:<12} {:>7} {:>7} {:>8} {:>8} {:>7}  {:>9} {:>6} {:>6}  {}\n",
                  results.front().at("head").is_null() ? "" : "head  ", "kind", "alpha", "beta",
                  "temp.", "entropy", "gap", "Var(ln P)", "skew", "KS", "verdict");
  for (std::size_t i = 0; i < results.size(); ++i) {
    const Json& e = results[i];
    text += layer_line(results, i) + head_cell(e);
    text += fmt::format("{:<12} {:>7} {:>7} {:>8} {:>8} {:>7}{} {:>9} {:>6} {:>6}  {}\n",
                        e.at("kind").get<std::string>(), cell(e, "alpha", 3), cell(e, "beta", 3),
                        cell(e, "temperature", 3), cell(e, "entropy_nats", 3),
                        cell(e, "spectral_gap", 3), unconverged(e) ? "?" : " ",
                        cell(e, "log_var", 3), cell(e, "skew", 2), cell(e, "ks", 3),
                        e.at("verdict").is_null() ? "-" : e.at("verdict").get<std::string>());
  }
  return text;
}

// Entropy of the first row, the last, and three between them.
std::string positions(const Json& results) {
  std::string text = "Entropy against position, position: nats, of the first sequence or seed\n";
  for (std::size_t i = 0; i < results.size(); ++i) {
    const Json& e = results[i];
    text += layer_line(results, i) + head_cell(e) +
            fmt::format("{:<12}", e.at("kind").get<std::string>());
    const Json& list = e.at("by_position");
    std::size_t shown = list.size();
    for (std::size_t quarter = 0; quarter <= 4; ++quarter) {
      const std::size_t at = (list.size() - 1) * quarter / 4;
      if (at == shown) continue;
      shown = at;
      const Json& p = list[at];
      text += fmt::format(
          " {:>8}: {:.3f}",
          (p.at("first").get<std::int64_t>() + p.at("last").get<std::int64_t>()) / 2 + 1,
          p.at("entropy_nats").get<double>());
    }
    text += "\n";
  }
  return text;
}

std::string to_text(const Findings& found, const Request& request,
                    const AnalysisRequest& analysis) {
  std::vector<std::string> facts;
  for (const auto& [name, value] : found.heading.facts) {
    facts.push_back(fmt::format("{} {}", name, value));
  }
  std::string text =
      fmt::format("{}: {}\n", request.gaussian.empty() ? "q and k of the file" : "Gaussian q and k",
                  fmt::join(facts, ", "));
  if (std::any_of(analysis.kinds.begin(), analysis.kinds.end(), report::has_scales)) {
    text += fmt::format("alpha and beta: {}\n", to_string(analysis.matching));
  }
  text += "\n" + table(found.results);
  text +=
      "\n"
      "  temp.    temperature: 1 / sqrt(sigma_q^2 sigma_k^2 + c_cross) for softmax, otherwise\n"
      "           1 / sqrt(Var(ln P))\n"
      "  entropy  of the rows of P, mean, in nats\n"
      "  gap      1 - |lambda_2| of P\n"
      "  KS       distance of ln P to the normal distribution\n"
      "  verdict  diffuse: rows read more than half of the keys; biased: all rows read the same\n"
      "           few keys; unbiased: each reads its own\n";
  if (std::any_of(found.results.begin(), found.results.end(), unconverged)) {
    text += "  ?        the iteration for lambda_2 had not converged: --json has its residual\n";
  }
  // One reason stands for all heads: the others are in the JSON.
  const auto refused = std::find_if(found.results.begin(), found.results.end(), [](const Json& e) {
    return e.at("spectrum").contains("refused");
  });
  if (refused != found.results.end()) {
    text += fmt::format(
        "\nNo spectral gap{}: {}\n",
        request.causal ? "" : fmt::format(" of {}", refused->at("kind").get<std::string>()),
        refused->at("spectrum").at("refused").get<std::string>());
  }
  if (request.causal) text += "\n" + positions(found.results);
  return text;
}

int run(const Request& request, const std::string& command) {
  const AnalysisRequest analysis = analysis_of(request);
  check(request, analysis);
  const bool gaussian = !request.gaussian.empty();
  const GaussianSpec spec = gaussian ? parse_gaussian(request.gaussian) : GaussianSpec{};
  Findings found;
  {
    Progress progress("lln analyze");
    ThreadPool threads(request.threads);
    if (gaussian) {
      found.results = analyze_gaussian(spec, analysis, "analyze", threads, progress);
      found.heading = gaussian_heading(spec, command);
    } else {
      found = analyze_dump(request, analysis, command, threads, progress);
    }
    if (!request.report.empty()) {
      Json sweep = Json::array();
      if (gaussian && !request.causal) {
        sweep = sweep_temperature(spec, analysis, "analyze", threads, progress);
      }
      const CostInput input(kCostTokens, threads);
      const std::vector<CostRow> cost =
          measure_cost(input, "lln analyze: cost", {.parallel = &threads}, progress);
      write_report(request.report,
                   report_data(found.heading, found.results, sweep, cost, threads.workers()));
    }
  }
  if (request.json) {
    print_json(found.results);
    return kOk;
  }
  fmt::print("{}", to_text(found, request, analysis));
  if (!request.report.empty()) fmt::print("\nwrote {}\n", request.report);
  return kOk;
}

const char* const kExamples =
    "  lln analyze qk.safetensors\n"
    "  lln analyze qk.safetensors --kinds softmax,lln --matching entropy --report out.html\n"
    "  lln analyze --q q.npy --k k.npy --json\n"
    "  lln analyze --gaussian sigma_q=1,sigma_k=1,n=512,d=64,seeds=8 --report out.html\n\n";

}  // namespace

Verb add_analyze(CLI::App& program, const std::string& command_line) {
  CLI::App* command = program.add_subcommand(
      "analyze", "How attention concentrates: entropy, spectral gap, log-normality, and a report");
  const auto request = std::make_shared<Request>();
  add_dump_options(*command, request->dump);
  command->add_option("--gaussian", request->gaussian,
                      "In place of FILE: sigma_q=1,sigma_k=1,n=512,d=64,seeds=8");
  command->add_option("--kinds", request->kinds, "Attentions to measure, with commas between")
      ->delimiter(',')
      ->capture_default_str();
  command
      ->add_option("--matching", request->matching,
                   "How alpha and beta are set; per_head where not given")
      ->check(CLI::IsMember({"none", "paper", "per_head", "exact", "entropy", "frozen"}));
  command->add_option("--calibration", request->calibration,
                      "alpha and beta by layer, as lln calibrate writes them; mode frozen");
  command->add_flag("--causal", request->causal, "Row i sees keys j <= i: entropy by position");
  command->add_option("--rows", request->rows, "Rows of each matrix to look at; 0: all")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 30))
      ->capture_default_str();
  command->add_option("--report", request->report, "Write an HTML page with figures to this file");
  add_threads_option(*command, request->threads);
  add_json_option(*command, request->json);
  command->footer(help_footer(
      std::string(kExamples) + kDumpHelp +
      "Kinds: softmax, lln, lln+diagB, diagB, elu, relu, softplus, powerP, quadratic, performer,\n"
      "performerM, linear. The sequences of a batch are samples of a head: numbers are their "
      "means.\n"));
  return {command, [request, command_line] { return run(*request, command_line); }};
}

}  // namespace lln::cli
