// lln cost: time and memory of a training step of a config, for attentions and lengths beside each
// other.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/version.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <new>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "bench/machine.h"
#include "lln/error.h"
#include "lln/version.h"
#include "lln_torch/cli/verbs.h"
#include "lln_torch/train/peak_memory.h"
#include "lln_torch/train/step_cost.h"
#include "lln_torch/train/trainer.h"
#include "lln_torch/zoo/attention.h"

namespace lln::cli {
namespace {

struct CostArguments {
  std::string config, data, device = "cpu", command;
  std::vector<std::string> sets, attentions;
  std::vector<std::int64_t> tokens;
  double seconds = 1;
  int threads = 0;
  bool json = false;
};

struct CostPoint {
  std::string attention;
  std::int64_t tokens = 0, rows = 0, parameters = 0;
  lln_torch::StepCost cost;
  std::string failure;  // why there is no cost
};

// Empty and 0 leave what the config says.
lln_torch::Settings point_config(const CostArguments& arguments, const std::string& attention,
                                 std::int64_t tokens) {
  auto config = lln_torch::Settings::from_file(arguments.config);
  for (const std::string& set : arguments.sets) config.set(set);
  if (!attention.empty()) config.set(fmt::format("attention.name=\"{}\"", attention));
  if (tokens > 0) config.set(fmt::format("data.tokens={}", tokens));
  return config;
}

void measure_into(CostPoint& point, const CostArguments& arguments,
                  const lln_torch::Settings& config, const torch::Device& device) {
  const auto made = lln_torch::make_run_model(config, arguments.data, device, /*begins=*/false);
  point.attention = made.attention;
  point.tokens = made.source->task().max_tokens;
  point.rows = made.settings.batch;
  point.parameters = made.parameters;
  point.cost = lln_torch::measure_step_cost(made, device, arguments.seconds);
}

constexpr const char* kOutOfMemory = "out of memory";

// Every way in which torch, the core and the system say so; of other faults the first line.
std::string failure_text(const std::exception& fault) {
  const auto* const torch_fault = dynamic_cast<const c10::Error*>(&fault);
  const std::string text =
      torch_fault != nullptr ? torch_fault->what_without_backtrace() : fault.what();
  const auto* const core_fault = dynamic_cast<const Error*>(&fault);
  const bool memory =
      dynamic_cast<const c10::OutOfMemoryError*>(&fault) != nullptr ||
      dynamic_cast<const std::bad_alloc*>(&fault) != nullptr ||
      (core_fault != nullptr && core_fault->code() == ErrorCode::out_of_memory) ||
      (torch_fault != nullptr && text.find("can't allocate memory") != std::string::npos);
  return memory ? kOutOfMemory : text.substr(0, text.find('\n'));
}

CostPoint measure_point(const CostArguments& arguments, const std::string& attention,
                        std::int64_t tokens, const torch::Device& device) {
  const lln_torch::Settings config = point_config(arguments, attention, tokens);
  CostPoint point{.attention = attention, .tokens = tokens};
  try {
    measure_into(point, arguments, config, device);
  } catch (const Error& e) {
    if (e.code() == ErrorCode::invalid_argument || e.code() == ErrorCode::io) throw;
    point.failure = failure_text(e);
  } catch (const std::bad_alloc& e) {
    point.failure = failure_text(e);
  } catch (const c10::Error& e) {
    point.failure = failure_text(e);
  }
  lln_torch::release_cached_memory(device);
  return point;
}

Json point_json(const CostPoint& point) {
  Json json = {{"attention", point.attention},
               {"tokens", point.tokens},
               {"rows", point.rows},
               {"parameters", point.parameters}};
  if (!point.failure.empty()) {
    json["failure"] = point.failure;
    return json;
  }
  json["step_ms"] = 1e3 * point.cost.seconds;
  json["fastest_ms"] = 1e3 * point.cost.fastest_seconds;
  json["steps"] = point.cost.steps;
  json["tokens_per_second"] = point.cost.tokens / point.cost.seconds;
  json["memory_bytes"] = point.cost.memory_bytes ? Json(*point.cost.memory_bytes) : Json(nullptr);
  return json;
}

constexpr const char* kCostHeader =
    "attention              tokens        step peak memory    tokens/s\n";

std::string point_text(const CostPoint& point) {
  const std::string head = fmt::format("{:<20} {:>8}", point.attention, point.tokens);
  if (!point.failure.empty()) return fmt::format("{}  {}\n", head, point.failure);
  const auto memory = point.cost.memory_bytes;
  return fmt::format("{} {:>11} {:>11} {:>11.0f}\n", head, time_text(point.cost.seconds),
                     memory ? size_text(static_cast<double>(*memory)) : "-",
                     point.cost.tokens / point.cost.seconds);
}

std::string machine_name(const torch::Device& device) {
  if (!device.is_cuda()) {
    return fmt::format("{}, {} threads", bench::cpu_name(), at::get_num_threads());
  }
  const BuildInfo info = build_info();
  return info.cuda.devices.empty() ? "a CUDA device" : info.cuda.devices.front().name;
}

int run_cost(const CostArguments& arguments) {
  const torch::Device device = lln_torch::find_device(arguments.device);
  lln_torch::prepare_torch(arguments.threads, device);
  const auto attentions =
      arguments.attentions.empty() ? std::vector<std::string>{""} : arguments.attentions;
  auto lengths = arguments.tokens.empty() ? std::vector<std::int64_t>{0} : arguments.tokens;
  std::sort(lengths.begin(), lengths.end());
  // A wrong name is said before the first is measured.
  for (const std::string& name : arguments.attentions) lln_torch::find_attention(name);
  Json points = Json::array();
  std::set<std::string> too_large;
  bool broken = false;  // by a fault after which the device may do anything
  // Attentions in turn at each length: what a machine does meanwhile does not fall on one of them.
  for (const std::int64_t tokens : lengths) {
    for (const std::string& attention : attentions) {
      if (broken || too_large.contains(attention)) continue;
      const CostPoint point = measure_point(arguments, attention, tokens, device);
      if (point.failure == kOutOfMemory) too_large.insert(attention);
      broken = !point.failure.empty() && point.failure != kOutOfMemory;
      if (!arguments.json) {
        if (points.empty()) fmt::print("{}", kCostHeader);
        fmt::print("{}", point_text(point));
        std::fflush(stdout);
      }
      points.push_back(point_json(point));
    }
  }
  if (arguments.json) {
    print_json({{"command", arguments.command},
                {"machine", machine_name(device)},
                {"version", build_info().version},
                {"torch", TORCH_VERSION},
                {"points", points}});
  }
  return broken ? kDevice : kOk;
}

}  // namespace

Verb add_cost(CLI::App& program, const std::string& command_line) {
  auto arguments = std::make_shared<CostArguments>();
  arguments->command = command_line;
  CLI::App* command = program.add_subcommand(
      "cost", "Time and memory of a training step, for attentions and lengths");
  command->add_option("CONFIG", arguments->config, "TOML file, as of lln train")->required();
  command
      ->add_option("--attention", arguments->attentions,
                   "Names of the zoo; otherwise that of CONFIG")
      ->delimiter(',');
  command->add_option("--tokens", arguments->tokens, "Lengths; otherwise that of CONFIG")
      ->check(CLI::PositiveNumber)
      ->delimiter(',');
  command->add_option("--seconds", arguments->seconds, "Time to measure for, at each point")
      ->check(CLI::Range(0.0, 3600.0))
      ->capture_default_str();
  command
      ->add_option("--set", arguments->sets, "key=value in place of the file's, as train.batch=8")
      ->type_size(1)
      ->allow_extra_args(false);
  command->add_option("--data", arguments->data, "Folder with the data of the task");
  command->add_option("--device", arguments->device, "cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  add_threads_option(*command, arguments->threads);
  add_json_option(*command, arguments->json);
  command->footer(
      "Nothing is written: the first batch is trained on again and again. The task random-tokens\n"
      "needs no data. Lengths beyond one that memory did not suffice for are left out; any other\n"
      "failure ends with exit code 5, after what was measured.\n\n" +
      help_footer("  lln cost examples/configs/roberta-base.toml --attention softmax,lln+diag\n"
                  "  lln cost mlm.toml --tokens 512,2048,8192 --device cuda --json\n"));
  return {command, [arguments] { return run_cost(*arguments); }};
}

}  // namespace lln::cli
