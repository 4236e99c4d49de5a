// lln calibrate: alpha and beta of every layer and head of a dump, into a file that the library
// loads.
// SPDX-License-Identifier: Apache-2.0
#include "lln/calibration.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "dump_file.h"
#include "interruption.h"
#include "progress.h"
#include "scales.h"
#include "verb.h"

namespace lln::cli {
namespace {

struct Request {
  DumpOptions dump;
  std::string output;
  std::string matching = "entropy";
  int threads = 0;
  bool json = false;
};

struct Outcome {
  std::string input;
  Calibration calibration;
  std::vector<MatchingReport> reports;  // one per layer
};

Outcome calibrate_layers(const Request& request) {
  Outcome outcome;
  Progress progress("lln calibrate");
  ThreadPool threads(request.threads);
  const std::unique_ptr<io::TensorSource> source = open_dump(request.dump);
  const DumpFile dump(*source, request.dump);
  outcome.input = dump.path();
  outcome.calibration.mode = parse_matching(request.matching);
  for (std::size_t i = 0; i < dump.layers().size(); ++i) {
    progress.stage(fmt::format("lln calibrate: layer {} of {}", i + 1, dump.layers().size()));
    const DumpLayer layer = dump.read(i);
    MatchingReport& report = outcome.reports.emplace_back();
    CalibratedLayer found =
        calibrate({.q = layer.q.view, .k = layer.k.view}, outcome.calibration.mode, &report.clamped,
                  {.parallel = &threads});
    found.name = layer.name;
    outcome.calibration.layers.push_back(std::move(found));
    if (!report.clamped.empty()) {
      progress.print(stderr, fmt::format("lln: warning: layer '{}': {}\n", layer.name,
                                         clamped_text(report.clamped, outcome.calibration.mode)));
    }
  }
  return outcome;
}

void report(const Outcome& outcome, const Request& request) {
  if (request.json) {
    Json layers = Json::array();
    for (std::size_t i = 0; i < outcome.reports.size(); ++i) {
      const CalibratedLayer& layer = outcome.calibration.layers[i];
      layers.push_back({{"name", layer.name},
                        {"dim", layer.dim},
                        {"tokens", layer.tokens},
                        {"alpha", layer.alpha},
                        {"beta", layer.beta},
                        {"clamped", to_json(outcome.reports[i].clamped)}});
    }
    print_json({{"input", outcome.input},
                {"output", request.output},
                {"mode", to_string(outcome.calibration.mode)},
                {"layers", layers}});
    return;
  }
  for (const CalibratedLayer& layer : outcome.calibration.layers) {
    const auto [low_alpha, high_alpha] =
        std::minmax_element(layer.alpha.begin(), layer.alpha.end());
    const auto [low_beta, high_beta] = std::minmax_element(layer.beta.begin(), layer.beta.end());
    fmt::print("{}{}{} heads of {}: alpha {:.4g} to {:.4g}, beta {:.4g} to {:.4g}\n", layer.name,
               layer.name.empty() ? "" : ": ", layer.alpha.size(), layer.dim, *low_alpha,
               *high_alpha, *low_beta, *high_beta);
  }
  fmt::print("wrote {}: mode {}\n", request.output, to_string(outcome.calibration.mode));
}

int run(const Request& request) {
  check_output("-o", request.output, input_paths(request.dump));
  const Outcome outcome = calibrate_layers(request);
  {
    const NotedSignals signals;  // a small file: it is finished first
    save_calibration(outcome.calibration, request.output);
  }
  report(outcome, request);
  return kOk;
}

}  // namespace

Verb add_calibrate(CLI::App& program) {
  CLI::App* command = program.add_subcommand(
      "calibrate", "alpha and beta of every layer and head of dumped q and k, for mode frozen");
  const auto request = std::make_shared<Request>();
  add_dump_options(*command, request->dump);
  command->add_option("-o,--output", request->output, "JSON file to write")->required();
  command->add_option("--matching", request->matching, "How alpha and beta are found")
      ->check(CLI::IsMember({"paper", "per_head", "exact", "entropy"}))
      ->capture_default_str();
  add_threads_option(*command, request->threads);
  add_json_option(*command, request->json);
  command->footer(help_footer(
      std::string(
          "  lln calibrate dump.safetensors -o calibration.json\n"
          "  lln calibrate dump.safetensors -o calibration.json --q-name query --k-name key\n"
          "  lln calibrate --q q.npy --k k.npy -o calibration.json --matching exact\n\n") +
      kDumpHelp +
      "k may have other tokens than q.\n\nMoments of a key head are taken over all sequences of "
      "its layer. lln::load_calibration\n"
      "reads the file, and so do lln analyze and lln run with --calibration.\n"));
  return {command, [request] { return run(*request); }};
}

}  // namespace lln::cli
