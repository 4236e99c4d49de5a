// lln dump: q and k of every layer of a run on rows of its validation set, as lln analyze and lln
// calibrate read them.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "io/safetensors.h"
#include "lln/error.h"
#include "lln_torch/cli/run_arguments.h"
#include "lln_torch/train/instruments.h"
#include "lln_torch/train/named_tensors.h"

namespace lln::cli {
namespace {

using lln_torch::ObservedLayer;

struct DumpArguments : RunArguments {
  std::string output;
  std::int64_t rows = 1, tokens = 4096;
};

// Rows of one layer as one tensor: [rows, heads, tokens, channels], as many tokens as the shortest
// row has.
lln_torch::NamedTensors layer_tensors(const std::vector<const ObservedLayer*>& rows) {
  std::int64_t tokens = rows.front()->q.size(1);
  for (const ObservedLayer* row : rows) tokens = std::min(tokens, row->q.size(1));
  std::map<std::string, std::vector<at::Tensor>> parts;
  for (const ObservedLayer* row : rows) {
    parts["q"].push_back(row->q.narrow(1, 0, tokens));
    parts["k"].push_back(row->k.narrow(1, 0, tokens));
    if (row->alpha.defined()) {
      parts["alpha"].push_back(row->alpha);
      parts["beta"].push_back(row->beta);
    }
  }
  lln_torch::NamedTensors made;
  for (const auto& [name, list] : parts) {
    made.emplace(fmt::format("layer.{}.{}", rows.front()->layer, name),
                 at::stack(list).contiguous());
  }
  return made;
}

int run_dump(const DumpArguments& arguments) {
  check_output("--output", arguments.output, {});
  const LoadedRun loaded = load_run(arguments);
  const lln_torch::Source& source = *loaded.made.source;
  const std::int64_t rows = std::min(arguments.rows, source.validation_rows());
  lln_torch::Recorder recorder(rows, arguments.tokens);
  {
    const at::NoGradGuard no_gradients;
    lln_torch::Context context;
    context.step = loaded.step;
    context.observer = &recorder;
    loaded.made.model->run(lln_torch::to_tensors(source.validation_batch(0, rows), loaded.device),
                           context);
  }
  std::map<std::int64_t, std::vector<const ObservedLayer*>> layers;
  for (const ObservedLayer& layer : recorder.layers()) {
    if (layer.q.defined()) layers[layer.layer].push_back(&layer);
  }
  if (layers.empty()) {
    throw Error(ErrorCode::unsupported, fmt::format("{}: the attention {} has no queries and keys",
                                                    arguments.run, loaded.made.attention));
  }
  lln_torch::NamedTensors tensors;
  for (const auto& [number, list] : layers) tensors.merge(layer_tensors(list));
  io::write_safetensors(arguments.output, lln_torch::to_write(tensors),
                        {{"run", arguments.run},
                         {"step", fmt::format("{}", loaded.step)},
                         {"attention", loaded.made.attention},
                         {"task", source.task().name}});
  if (arguments.json) {
    print_json({{"output", arguments.output},
                {"step", loaded.step},
                {"attention", loaded.made.attention},
                {"layers", layers.size()},
                {"tensors", tensors.size()}});
  } else {
    const at::Tensor q = tensors.at(fmt::format("layer.{}.q", layers.begin()->first));
    fmt::print("{}: q and k of {} layers, step {}, [{} rows, {} heads, {} tokens, {} channels]\n",
               arguments.output, layers.size(), loaded.step, q.size(0), q.size(1), q.size(2),
               q.size(3));
    // What analyze would do otherwise is not what the run does.
    std::string as_in_the_run =
        source.task().kind == lln_torch::TaskKind::next_token ? " --causal" : "";
    if (layers.begin()->second.front()->alpha.defined()) as_in_the_run += " --matching frozen";
    if (!as_in_the_run.empty()) {
      fmt::print("as in the run: lln analyze {}{}\n", arguments.output, as_in_the_run);
    }
  }
  return kOk;
}

}  // namespace

Verb add_dump(CLI::App& program) {
  auto arguments = std::make_shared<DumpArguments>();
  CLI::App* command =
      program.add_subcommand("dump", "Write q and k of a run's layers, for lln analyze");
  add_run_arguments(*command, *arguments);
  command->add_option("-o,--output", arguments->output, "Safetensors file to write")->required();
  command->add_option("--rows", arguments->rows, "Rows of the validation set")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->add_option("--tokens", arguments->tokens, "Tokens of a row, at most")
      ->check(CLI::PositiveNumber)
      ->capture_default_str();
  command->footer(
      "Writes layer.0.q, layer.0.k, ... [rows, heads, tokens, channels] in F32, without padding;\n"
      "of LLN also layer.0.alpha and layer.0.beta [rows, heads], which lln analyze takes with\n"
      "--matching frozen; of a decoder it wants --causal, too.\n\n" +
      help_footer(
          "  lln dump runs/first -o build/first.safetensors --rows 4\n"
          "  lln analyze build/first.safetensors --matching frozen --report build/f.html\n"));
  return {command, [arguments] { return run_dump(*arguments); }};
}

}  // namespace lln::cli
