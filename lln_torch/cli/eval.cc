// lln eval: a checkpoint of a run on the validation set of its task. Loading of runs is here too.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>

#include "lln_torch/cli/run_arguments.h"
#include "lln_torch/models/weights.h"
#include "lln_torch/train/checkpoint.h"
#include "lln_torch/train/evaluation.h"
#include "lln_torch/train/trainer.h"

namespace lln::cli {

void add_run_arguments(CLI::App& command, RunArguments& arguments) {
  command.add_option("RUN", arguments.run, "Folder of a run")->required();
  command.add_option("--checkpoint", arguments.checkpoint, "best, last or the number of a step")
      ->capture_default_str();
  command.add_option("--data", arguments.data,
                     "Folder with the data; otherwise that of the training");
  command.add_option("--device", arguments.device, "cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  add_threads_option(command, arguments.threads);
  add_json_option(command, arguments.json);
}

LoadedRun load_run(const RunArguments& arguments) {
  const lln_torch::RunFolder run(arguments.run);
  const auto config = lln_torch::Settings::from_json(run.read_config(), run.config_json());
  const std::string data =
      arguments.data.empty() ? run.read_run().value("data", "") : arguments.data;
  LoadedRun loaded;
  loaded.device = lln_torch::find_device(arguments.device);
  lln_torch::prepare_torch(arguments.threads, loaded.device);
  loaded.step = lln_torch::find_checkpoint(run, arguments.checkpoint);
  loaded.made = lln_torch::make_run_model(config, data, loaded.device, /*begins=*/false);
  const std::string path = lln_torch::checkpoint_path(run.checkpoints(), loaded.step);
  const lln_torch::Checkpoint checkpoint = lln_torch::load_checkpoint(path);
  lln_torch::copy_tensors(checkpoint.weights, lln_torch::named_weights(*loaded.made.model), path);
  loaded.made.model->eval();
  return loaded;
}

namespace {

int run_eval(const RunArguments& arguments, std::int64_t rows, std::int64_t batch) {
  const LoadedRun loaded = load_run(arguments);
  const lln_torch::Task& task = loaded.made.source->task();
  lln_torch::EvaluationOptions options;
  options.rows = rows;
  options.batch = batch > 0 ? batch : loaded.made.settings.evaluate_batch;
  options.bf16 = loaded.made.settings.step.bf16;
  options.step = loaded.step;
  const auto found =
      lln_torch::evaluate(*loaded.made.model, *loaded.made.source, loaded.device, options);
  Json metrics;
  metrics["loss"] = found->loss;
  for (const auto& [name, value] : found->metrics) metrics[name] = value;
  if (arguments.json) {
    print_json({{"run", arguments.run},
                {"name", loaded.made.name},
                {"task", task.name},
                {"step", loaded.step},
                {"rows", found->rows},
                {"metrics", metrics},
                {"metric", task.metrics.front()},
                {"chance", task.chance},
                {"chance_text", task.chance_text},
                {"parameters", loaded.made.parameters}});
    return kOk;
  }
  fmt::print("{}: {} on {}, step {}, {} rows\n", arguments.run, loaded.made.name, task.name,
             loaded.step, found->rows);
  for (const auto& [name, value] : metrics.items()) {
    fmt::print("  {:10} {:.4f}{}\n", name, value.get<double>(),
               name == task.metrics.front()
                   ? fmt::format("   chance {:.4f}{}", task.chance,
                                 task.chance_text.empty() ? "" : ": " + task.chance_text)
                   : "");
  }
  return kOk;
}

}  // namespace

Verb add_eval(CLI::App& program) {
  struct Arguments : RunArguments {
    std::int64_t rows = 0, batch = 0;
  };
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = program.add_subcommand("eval", "Evaluate a run on its validation set");
  add_run_arguments(*command, *arguments);
  command->add_option("--rows", arguments->rows, "The first so many rows; 0: all")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--batch", arguments->batch, "Rows at once; 0: as in the training")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->footer(
      help_footer("  lln eval runs/first\n"
                  "  lln eval runs/first --checkpoint last --json\n"));
  return {command, [arguments] { return run_eval(*arguments, arguments->rows, arguments->batch); }};
}

}  // namespace lln::cli
