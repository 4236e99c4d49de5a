// lln compare: runs beside each other, as a table and as curves in the one-file HTML report.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <array>
#include <cmath>
#include <filesystem>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>

#include "lln/error.h"
#include "lln/version.h"
#include "lln_torch/cli/verbs.h"
#include "lln_torch/train/evaluation.h"
#include "lln_torch/train/json_lines.h"
#include "lln_torch/train/run_folder.h"
#include "report_page.h"

namespace lln::cli {
namespace {

constexpr std::size_t kMostPoints = 400;  // of one curve of training

struct CompareArguments {
  std::vector<std::string> runs;
  std::string report, command;
  bool json = false;
};

struct ComparedRun {
  Json facts;                 // run.json
  std::string label;          // its name, with the folder where two have one
  Json loss = Json::array();  // [step, loss]
  Json evaluation = Json::array();
  Json concentration = Json::array();  // {step, layer, entropy, gap, temperature, alpha}
  double best = NAN, final_loss = NAN, tokens_per_second = NAN;
  std::int64_t best_step = -1;
};

// Neighbours joined to their mean, so that a long training stays a small page.
Json thinned(const std::vector<std::pair<std::int64_t, double>>& points) {
  const std::size_t each = (points.size() + kMostPoints - 1) / kMostPoints;
  Json thin = Json::array();
  for (std::size_t i = 0; i < points.size(); i += each) {
    const std::size_t end = std::min(points.size(), i + each);
    double sum = 0;
    for (std::size_t j = i; j < end; ++j) sum += points[j].second;
    thin.push_back({points[end - 1].first, sum / static_cast<double>(end - i)});
  }
  return thin;
}

void read_metrics(const lln_torch::RunFolder& folder, ComparedRun& run) {
  const std::string metric = run.facts.at("metric");
  std::vector<std::pair<std::int64_t, double>> losses;
  std::vector<double> speeds;
  for (const Json& row : lln_torch::read_json_lines(folder.metrics())) {
    const std::int64_t step = row.at("step");
    if (row.contains("evaluation")) {
      const Json& value = row.at("evaluation").at(metric);
      if (!value.is_number()) continue;
      run.evaluation.push_back({step, value});
      if (run.best_step < 0 || lln_torch::is_better(metric, value, run.best)) {
        run.best = value;
        run.best_step = step;
      }
    } else if (row.at("loss").is_number()) {
      losses.emplace_back(step, row.at("loss").get<double>());
      if (row.at("tokens_per_second").is_number()) {
        speeds.push_back(row.at("tokens_per_second").get<double>());
      }
    }
  }
  run.loss = thinned(losses);
  if (!losses.empty()) run.final_loss = losses.back().second;
  if (!speeds.empty()) {
    std::nth_element(speeds.begin(), speeds.begin() + std::ssize(speeds) / 2, speeds.end());
    run.tokens_per_second = speeds[speeds.size() / 2];
  }
}

void read_instruments(const lln_torch::RunFolder& folder, ComparedRun& run) {
  if (!std::filesystem::exists(folder.instruments())) return;
  struct Mean {
    double sum = 0;
    std::int64_t count = 0;
  };
  constexpr std::array kNames = {"entropy", "gap", "temperature", "alpha"};
  std::map<std::pair<std::int64_t, std::int64_t>, std::array<Mean, kNames.size()>> means;
  for (const Json& row : lln_torch::read_json_lines(folder.instruments())) {
    auto& place = means[{row.at("step"), row.at("layer")}];
    for (std::size_t i = 0; i < kNames.size(); ++i) {
      if (!row.at(kNames[i]).is_number()) continue;
      place[i].sum += row.at(kNames[i]).get<double>();
      ++place[i].count;
    }
  }
  for (const auto& [place, values] : means) {
    Json entry = {{"step", place.first}, {"layer", place.second}};
    for (std::size_t i = 0; i < kNames.size(); ++i) {
      entry[kNames[i]] = values[i].count > 0
                             ? Json(values[i].sum / static_cast<double>(values[i].count))
                             : Json(nullptr);
    }
    run.concentration.push_back(entry);
  }
}

std::vector<ComparedRun> read_runs(const std::vector<std::string>& paths) {
  std::vector<ComparedRun> runs;
  std::map<std::string, int> names;
  for (const std::string& path : paths) {
    const lln_torch::RunFolder folder(path);
    ComparedRun run;
    run.facts = folder.read_run();
    try {
      read_metrics(folder, run);
      read_instruments(folder, run);
      run.label = run.facts.at("name");
    } catch (const Json::exception& e) {
      throw Error(ErrorCode::io, fmt::format("{}: not the files of a run: {}", path, e.what()));
    }
    ++names[run.label];
    runs.push_back(std::move(run));
  }
  for (std::size_t i = 0; i < runs.size(); ++i) {
    if (names[runs[i].label] > 1) runs[i].label += fmt::format(" ({})", paths[i]);
  }
  return runs;
}

void expect_one_task(const std::vector<ComparedRun>& runs, const std::vector<std::string>& paths) {
  for (std::size_t i = 1; i < runs.size(); ++i) {
    for (const char* const key : {"task", "metric"}) {
      if (runs[i].facts.at(key) == runs[0].facts.at(key)) continue;
      throw UsageError(fmt::format("{} has the {} {}, {} has {}: runs of one task are compared",
                                   paths[0], key, runs[0].facts.at(key).dump(), paths[i],
                                   runs[i].facts.at(key).dump()));
    }
    // That of the validation set; its last digits may depend on the machine.
    const double first = runs[0].facts.at("chance"), chance = runs[i].facts.at("chance");
    if (std::abs(first - chance) <= 1e-6 * std::abs(first)) continue;
    throw UsageError(
        fmt::format("{} has the chance {}, {} has {}: runs on one validation set, with one "
                    "vocabulary, are compared",
                    paths[0], first, paths[i], chance));
  }
}

Json run_json(const ComparedRun& run) {
  return {{"label", run.label},
          {"attention", run.facts.at("attention")},
          {"best", run.best},
          {"best_step", run.best_step},
          {"chance", run.facts.at("chance")},
          {"final_loss", run.final_loss},
          {"tokens_per_second", run.tokens_per_second},
          {"parameters", run.facts.at("parameters")},
          {"steps", run.facts.at("steps")},
          {"loss", run.loss},
          {"evaluation", run.evaluation},
          {"concentration", run.concentration}};
}

Json compare_report(const CompareArguments& arguments, const std::vector<ComparedRun>& runs) {
  const Json& first = runs.front().facts;
  Json list = Json::array();
  std::set<std::string> devices;
  for (const ComparedRun& run : runs) {
    list.push_back(run_json(run));
    devices.insert(run.facts.value("device", "cpu"));
  }
  const std::string task = first.at("task");
  return {{"title", fmt::format("{} run{} on {}", runs.size(), runs.size() == 1 ? "" : "s", task)},
          {"lead",
           "Attentions trained on one task: loss, validation and concentration against "
           "the step."},
          {"facts",
           Json::array(
               {Json::array({"task", task}), Json::array({"metric", first.at("metric")}),
                Json::array({"chance", fmt::format("{:.4f}", first.at("chance").get<double>())}),
                Json::array({"device", fmt::format("{}", fmt::join(devices, ", "))})})},
          {"command", arguments.command},
          {"version", build_info().version},
          {"results", Json::array()},
          {"training",
           {{"metric", first.at("metric")},
            {"chance", first.at("chance")},
            {"chance_text", first.value("chance_text", "")},
            {"runs", list}}}};
}

std::string cell(double value, int digits) {
  return std::isfinite(value) ? fmt::format("{:.{}f}", value, digits) : "-";
}

void print_table(const std::vector<ComparedRun>& runs) {
  std::size_t width = 3;
  for (const ComparedRun& run : runs) width = std::max(width, run.label.size());
  const std::string metric = runs.front().facts.at("metric");
  fmt::print("{:{}}  {:>14}  {:>8}  {:>8}  {:>10}  {:>10}  {:>11}  attention\n", "run", width,
             "best " + metric, "at step", "chance", "final loss", "tokens/s", "parameters");
  for (const ComparedRun& run : runs) {
    fmt::print("{:{}}  {:>14}  {:>8}  {:>8}  {:>10}  {:>10}  {:>11}  {}\n", run.label, width,
               cell(run.best, 4), run.best_step < 0 ? "-" : fmt::format("{}", run.best_step),
               cell(run.facts.at("chance").get<double>(), 4), cell(run.final_loss, 4),
               cell(run.tokens_per_second, 0), run.facts.at("parameters").get<std::int64_t>(),
               run.facts.at("attention").get<std::string>());
  }
  const std::string chance = runs.front().facts.value("chance_text", "");
  if (!chance.empty()) fmt::print("chance: {}\n", chance);
}

int run_compare(const CompareArguments& arguments) {
  if (!arguments.report.empty()) check_output("--report", arguments.report, {});
  const std::vector<ComparedRun> runs = read_runs(arguments.runs);
  expect_one_task(runs, arguments.runs);
  if (!arguments.report.empty()) write_report(arguments.report, compare_report(arguments, runs));
  if (arguments.json) {
    Json list = Json::array();
    for (std::size_t i = 0; i < runs.size(); ++i) {
      Json entry = {{"run", arguments.runs[i]}};
      entry.update(run_json(runs[i]));
      for (const char* const curve : {"loss", "evaluation", "concentration"}) entry.erase(curve);
      list.push_back(entry);
    }
    print_json({{"task", runs.front().facts.at("task")},
                {"metric", runs.front().facts.at("metric")},
                {"runs", list}});
    return kOk;
  }
  print_table(runs);
  if (!arguments.report.empty()) fmt::print("curves: {}\n", arguments.report);
  return kOk;
}

}  // namespace

Verb add_compare(CLI::App& program, const std::string& command_line) {
  auto arguments = std::make_shared<CompareArguments>();
  arguments->command = command_line;
  CLI::App* command =
      program.add_subcommand("compare", "Compare runs: a table, and curves in an HTML report");
  command->add_option("RUN", arguments->runs, "Folders of runs of one task")->required();
  command->add_option("--report", arguments->report, "HTML file to write");
  add_json_option(*command, arguments->json);
  command->footer(
      help_footer("  lln compare runs/lln runs/softmax\n"
                  "  lln compare runs/* --report build/compare.html\n"));
  return {command, [arguments] { return run_compare(*arguments); }};
}

}  // namespace lln::cli
