// lln demo: what linear cost means, shown on this machine in less than a minute. LLN+Diag and
// softmax attention on the same random input of growing length, and how exact both are; then
// decoding and moment matching, each in a file of its own; last, a report to look at.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "analysis_report.h"
#include "cost.h"
#include "demo_concentration.h"
#include "demo_decode.h"
#include "lln/attention.h"
#include "lln/version.h"
#include "progress.h"
#include "report_page.h"
#include "verb.h"

namespace lln::cli {
namespace {

struct Request {
  std::int64_t max_tokens = 131072;
  std::string report = "lln_demo.html";
  int threads = 0;
  bool json = false;
};

std::vector<double> to_double(const ConstView& v) {
  std::vector<double> values;
  for (std::int64_t h = 0; h < v.shape[1]; ++h) {
    for (std::int64_t n = 0; n < v.shape[2]; ++n) {
      const auto* row = static_cast<const float*>(v.data) + h * v.stride[1] + n * v.stride[2];
      values.insert(values.end(), row, row + v.shape[3]);
    }
  }
  return values;
}

// Largest error relative to the largest output, against the reference in f64.
double exactness(const CostInput& input, std::int64_t tokens, Kind kind, const Exec& exec) {
  const AttentionInputs in = input.inputs(tokens);
  const AttentionOutputs out = input.outputs(tokens);
  attention_forward(in, out, cost_options(kind), exec);

  const Shape shape = in.q.shape;
  const double alpha = static_cast<double>(*static_cast<const float*>(in.alpha.data));
  const std::vector<double> q = to_double(in.q), k = to_double(in.k), v = to_double(in.v);
  std::vector<double> exact(q.size());
  const auto wide = [&](const std::vector<double>& values) {
    return view(static_cast<const void*>(values.data()), DType::f64, shape);
  };
  const ConstView scale = view(static_cast<const void*>(&alpha), DType::f64, {1, 1, 1, 1});
  attention_forward({.q = wide(q), .k = wide(k), .v = wide(v), .alpha = scale, .beta = scale},
                    {.o = view(static_cast<void*>(exact.data()), DType::f64, shape)},
                    cost_options(kind), {.parallel = exec.parallel, .kernel = "reference"});
  double error = 0, largest = 0;
  const std::vector<double> found = to_double(out.o);
  for (std::size_t i = 0; i < exact.size(); ++i) {
    error = std::max(error, std::abs(found[i] - exact[i]));
    largest = std::max(largest, std::abs(exact[i]));
  }
  return error / largest;
}

struct Findings {
  std::vector<CostRow> rows;
  std::string kernel;
  int threads = 0;
  double lln_error = 0, softmax_error = 0;
  DecodeFindings decoding;
  std::vector<ConcentrationRow> concentration;
};

Findings measure_all(const Request& request) {
  Findings found;
  ThreadPool threads(request.threads);
  Progress progress("lln demo: preparing input");
  const Exec exec{.parallel = &threads};
  std::int64_t longest = kCostFirstTokens;
  while (longest * 2 <= request.max_tokens) longest *= 2;
  const CostInput input(longest, threads);

  progress.stage("lln demo: comparing with the reference");
  found.lln_error = exactness(input, kCostFirstTokens, Kind::lln_diag, exec);
  found.softmax_error = exactness(input, kCostFirstTokens, Kind::softmax, exec);
  found.rows = measure_cost(input, "lln demo", exec, progress);
  progress.stage("lln demo: decoding");
  found.decoding =
      measure_decoding(input.inputs(longest), input.outputs(longest).o, kCostBlock, exec);
  progress.stage("lln demo: moment matching");
  found.concentration = measure_concentration(threads);
  found.threads = threads.workers();
  found.kernel = explain(make_problem(input.inputs(longest), input.outputs(longest),
                                      cost_options(Kind::lln_diag)),
                         exec)
                     .chosen;
  return found;
}

// Gaussian input, all kinds that the paper's central figure has, and the cost measured above.
void write_demo_report(const Findings& found, const Request& request, const std::string& command) {
  const GaussianSpec spec{.seeds = 2};
  const AnalysisRequest analysis{.kinds = parse_kinds({"softmax", "lln", "lln+diag64", "elu",
                                                       "relu", "quadratic", "performer"})};
  ThreadPool threads(request.threads);
  Progress progress("lln demo: report");
  const Json results = analyze_gaussian(spec, analysis, "demo", threads, progress),
             sweep = sweep_temperature(spec, analysis, "demo", threads, progress);
  write_report(request.report, report_data(gaussian_heading(spec, command), results, sweep,
                                           found.rows, found.threads));
}

std::string seconds_text(const CostMeasurement& m) {
  if (!m.predicted) return time_text(m.seconds);
  return fmt::format("~{:.{}f} s", m.seconds, m.seconds < 10 ? 1 : 0);
}

std::string speed_up_text(const CostRow& row) {
  const double times = row.softmax.seconds / row.lln_diag.seconds;
  return fmt::format("{}{:.{}f}x", row.softmax.predicted || row.lln_diag.predicted ? "~" : "",
                     times, times < 10 ? 1 : 0);
}

std::string to_text(const Findings& f, const Request& request, const std::string& program) {
  std::string text = fmt::format(
      "LLN+Diag against softmax attention on this machine: forward, f32, {} heads of\n"
      "{} channels, blocks of {} tokens, random input, {} thread{}, kernel {}.\n\n"
      "                 time of one call                  memory of one call\n"
      "   tokens    LLN+Diag    softmax  speed-up   LLN+Diag    softmax  N x N matrix\n",
      kCostHeads, kCostDim, kCostBlock, f.threads, f.threads == 1 ? "" : "s", f.kernel);
  for (const CostRow& row : f.rows) {
    text += fmt::format("  {:>7} {:>11} {:>10} {:>9} {:>10} {:>10} {:>13}\n", row.tokens,
                        seconds_text(row.lln_diag), seconds_text(row.softmax), speed_up_text(row),
                        size_text(row.lln_diag.bytes), size_text(row.softmax.bytes),
                        size_text(row.matrix_bytes));
  }
  text += fmt::format(
      "\n"
      "  speed-up      softmax over LLN+Diag; ~ is predicted from the row above, because\n"
      "                the call would take longer than {:.0f} s\n"
      "  memory        inputs, output and workspace; neither operation stores the N x N matrix\n"
      "                of attention weights, whose size is in the last column\n\n"
      "Largest error against the f64 reference at {} tokens, relative to the largest output\n"
      "(f32 rounds by 6e-08):  LLN+Diag {:.1e},  softmax {:.1e}.\n\n",
      kLongestCall, kCostFirstTokens, f.lln_error, f.softmax_error);
  text += to_text(f.decoding) + "\n" + to_text(f.concentration);
  text += fmt::format(
      "\nReport: {1}\n"
      "  one page with figures, opens in any browser: how softmax, LLN and other attentions\n"
      "  concentrate as the temperature falls, and what they cost here\n"
      "\nWhat to try next\n"
      "  {0} check --quick\n"
      "      every kernel on this machine against the f64 reference\n"
      "  {0} explain forward:bf16:cpu:b1h12n65536d64:lln+diag64:causal\n"
      "      which kernel runs a problem, its workspace, and why not the other kernels\n"
      "  {0} run --help\n"
      "      attention and its gradients on your own tensors, from a safetensors file\n"
      "  {0} analyze --help\n"
      "      how attention concentrates on queries and keys of your own model\n",
      program, std::filesystem::absolute(request.report).string());
  return text;
}

Json to_json(const Findings& f, const Request& request) {
  return {{"version", build_info().version},
          {"kernel", f.kernel},
          {"threads", f.threads},
          {"heads", kCostHeads},
          {"dim", kCostDim},
          {"diag_block", kCostBlock},
          {"rows", to_json(f.rows)},
          {"relative_error", {{"lln_diag", f.lln_error}, {"softmax", f.softmax_error}}},
          {"decoding", to_json(f.decoding)},
          {"matching", to_json(f.concentration)},
          {"report", request.report}};
}

}  // namespace

Verb add_demo(CLI::App& program, const std::string& program_path, const std::string& command_line) {
  CLI::App* command = program.add_subcommand(
      "demo", "LLN+Diag against softmax on random input: time, memory, exactness, decoding");
  const auto request = std::make_shared<Request>();
  command->add_option("--max-n", request->max_tokens, "Longest input in tokens")
      ->check(CLI::Range(kCostFirstTokens, std::int64_t{1} << 22))
      ->capture_default_str();
  command->add_option("--report", request->report, "Where the HTML page with figures goes")
      ->capture_default_str();
  add_threads_option(*command, request->threads);
  add_json_option(*command, request->json);
  command->footer(help_footer("  lln demo\n  lln demo --max-n 8192 --threads 1\n"));
  return {command, [request, program_path, command_line] {
            check_output("--report", request->report, {});
            const Findings found = measure_all(*request);
            write_demo_report(found, *request, command_line);
            if (request->json) {
              print_json(to_json(found, *request));
            } else {
              fmt::print("{}", to_text(found, *request, program_path));
            }
            return kOk;
          }};
}

}  // namespace lln::cli
