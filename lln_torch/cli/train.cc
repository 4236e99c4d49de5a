// lln train: a config becomes a run. The loop is lln_torch/train; here are the folder, the progress
// on stderr and what is said at the end.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/Parallel.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <torch/version.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "lln/error.h"
#include "lln/version.h"
#include "lln_torch/cli/train_ranks.h"
#include "lln_torch/cli/verbs.h"
#include "lln_torch/train/json_lines.h"
#include "lln_torch/train/not_finite.h"
#include "lln_torch/train/rank_state.h"
#include "lln_torch/train/run_model.h"
#include "lln_torch/train/trainer.h"

namespace lln::cli {
namespace {

using lln_torch::RunFolder;

struct TrainArguments {
  std::string config, data, run, device;
  std::vector<std::string> sets;
  bool resume = false, json = false;
  int threads = 0;
  double rank_timeout = 600;
  int sequence_ranks = 1;
  std::string command;
};

std::string rate_text(double tokens_per_second) {
  return tokens_per_second >= 1e4 ? fmt::format("{:.0f}k", tokens_per_second / 1e3)
                                  : fmt::format("{:.0f}", tokens_per_second);
}

std::string span_text(double seconds) {
  const auto s = static_cast<std::int64_t>(std::llround(seconds));
  if (s < 120) return fmt::format("{} s", s);
  if (s < 2 * 3600) return fmt::format("{} min", s / 60);
  return fmt::format("{} h {} min", s / 3600, s / 60 % 60);
}

// On a terminal one line that is drawn anew; elsewhere a line for every evaluation.
class TrainLine {
 public:
  explicit TrainLine(bool quiet) : quiet_(quiet), terminal_(::isatty(STDERR_FILENO) != 0) {}
  ~TrainLine() { clear(); }
  TrainLine(const TrainLine&) = delete;
  TrainLine& operator=(const TrainLine&) = delete;

  void progress(const lln_torch::TrainProgress& now) {
    const bool text = now.tokens_per_second > 0;
    last_ = fmt::format("step {}/{}  loss {:.4f}  rate {:.2e}  {} {}/s  {}  left {}", now.step,
                        now.steps, now.loss, now.learning_rate,
                        rate_text(text ? now.tokens_per_second : now.rows_per_second),
                        text ? "tokens" : "rows", size_text(static_cast<double>(now.memory_bytes)),
                        span_text(now.seconds_left));
    if (!terminal_ || quiet_) return;
    fmt::print(stderr, "\r\033[K{}", last_);
    std::fflush(stderr);
    shown_ = true;
  }
  void evaluated(const Json& row) {
    std::string text = fmt::format("step {}: ", row["step"].get<std::int64_t>());
    for (const auto& [name, value] : row["evaluation"].items()) {
      text += fmt::format("{} {:.4f}  ", name, value.get<double>());
    }
    text += fmt::format("(chance {:.4f}){}", row["chance"].get<double>(),
                        row["best"].get<bool>() ? "  best" : "");
    if (!terminal_ && !last_.empty()) text = last_ + "\n" + text;
    print(text);
  }
  void print(const std::string& text) {
    if (quiet_) return;
    clear();
    fmt::print(stderr, "{}\n", text);
  }

 private:
  void clear() {
    if (std::exchange(shown_, false)) fmt::print(stderr, "\r\033[K");
  }
  bool quiet_, terminal_;
  bool shown_ = false;
  std::string last_;
};

std::string read_text_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw Error(ErrorCode::io, path + ": cannot be read");
  return {std::istreambuf_iterator<char>(file), {}};
}

// With --resume the config is the run's own; one that is given must be the same.
void expect_same_config(const TrainArguments& arguments, const RunFolder& run, const Json& known) {
  if (arguments.config.empty()) return;
  const bool same = read_text_file(arguments.config) == read_text_file(run.config_toml()) &&
                    Json(arguments.sets) == known.value("set", Json::array());
  if (!same) {
    throw UsageError(
        fmt::format("{} was begun with another config or other --set than now: see "
                    "config.toml and run.json there; lln train --resume --run {} "
                    "goes on with its own",
                    run.path(), run.path()));
  }
}

std::string fingerprint_of(const lln_torch::RunModel& made) {
  return lln_torch::data_fingerprint(*made.source, made.settings.batch);
}

Json run_facts(const TrainArguments& arguments, const lln_torch::RunModel& made,
               const torch::Device& device, int ranks) {
  const lln_torch::Task& task = made.source->task();
  return {{"name", made.name},
          {"attention", made.attention},
          {"task", task.name},
          {"metric", task.metrics.front()},
          {"chance", task.chance},
          {"chance_text", task.chance_text},
          {"parameters", made.parameters},
          {"steps", made.settings.schedule.steps},
          {"batch", made.settings.batch},
          {"seed", made.settings.seed},
          {"data", arguments.data.empty()
                       ? std::string()
                       : std::filesystem::absolute(arguments.data).lexically_normal().string()},
          {"data_fingerprint", fingerprint_of(made)},
          {"set", arguments.sets},
          {"device", device.is_cuda() ? "cuda" : "cpu"},
          {"threads", at::get_num_threads()},
          {"ranks", ranks},
          {"version", build_info().version},
          {"torch", TORCH_VERSION},
          {"command", arguments.command}};
}

struct OpenedRun {
  RunFolder folder;
  lln_torch::Settings config;
  bool begun = false;
};

OpenedRun open_run(TrainArguments& arguments) {
  if (arguments.run.empty()) {
    if (arguments.config.empty()) throw UsageError("expected CONFIG, or --resume with --run");
    arguments.run = "runs/" + std::filesystem::path(arguments.config).stem().string();
  }
  OpenedRun opened{RunFolder(arguments.run), {}, false};
  const RunFolder& run = opened.folder;
  opened.begun = run.begun();
  if (!arguments.resume && !run.empty()) {
    throw UsageError(
        fmt::format("{} is there already: --resume goes on with it, another --run "
                    "begins anew",
                    run.path()));
  }
  if (opened.begun) {
    const Json known = run.read_run();
    expect_same_config(arguments, run, known);
    opened.config = lln_torch::Settings::from_json(run.read_config(), run.config_json());
    if (arguments.data.empty()) arguments.data = known.value("data", "");
    if (arguments.device.empty()) arguments.device = known.value("device", "cpu");
    // Sums are split by the number of threads: another number, other last bits.
    if (arguments.threads == 0) arguments.threads = known.value("threads", 0);
    return opened;
  }
  if (arguments.config.empty()) {
    throw UsageError(fmt::format("{}: there is no run to go on with, and no CONFIG", run.path()));
  }
  opened.config = lln_torch::Settings::from_file(arguments.config);
  for (const std::string& set : arguments.sets) opened.config.set(set);
  return opened;
}

// The run as rank 0 opened it, which alone looks at its folder: others may be on other machines.
OpenedRun open_run(TrainArguments& arguments, lln_torch::Ranks* ranks) {
  if (ranks == nullptr) return open_run(arguments);
  if (ranks->first()) {
    OpenedRun opened = open_run(arguments);
    // A run that is resumed has one number of threads for all ranks, so this one has, too.
    if (arguments.threads == 0) arguments.threads = at::get_num_threads();
    const Json told = {
        {"run", arguments.run},
        {"begun", opened.begun},
        {"config",
         opened.begun ? opened.folder.read_config().dump() : read_text_file(arguments.config)},
        {"config_name", opened.begun ? opened.folder.config_json() : arguments.config},
        {"set", arguments.sets},
        {"data", arguments.data},
        {"device", arguments.device},
        {"threads", arguments.threads},
        {"sequence_ranks", arguments.sequence_ranks}};
    ranks->from_first("run", told.dump());
    return opened;
  }
  const Json told = Json::parse(ranks->from_first("run", ""));
  const std::string text = told["config"], name = told["config_name"];
  OpenedRun opened{RunFolder(told["run"].get<std::string>()), {}, told["begun"].get<bool>()};
  opened.config = opened.begun ? lln_torch::Settings::from_json(Json::parse(text), name)
                               : lln_torch::Settings::from_toml(text, name);
  for (const Json& set : told["set"]) {
    if (!opened.begun) opened.config.set(set.get<std::string>());
  }
  if (arguments.sequence_ranks != told["sequence_ranks"]) {
    throw UsageError(fmt::format("--sequence-ranks {} of rank {}: rank 0 has {}",
                                 arguments.sequence_ranks, ranks->rank(),
                                 told["sequence_ranks"].get<int>()));
  }
  if (arguments.data.empty()) arguments.data = told["data"];
  if (arguments.device.empty()) arguments.device = told["device"];
  const int threads = told["threads"];
  if (arguments.threads != 0 && arguments.threads != threads) {
    throw UsageError(fmt::format("--threads {} of rank {}: rank 0 has {}, which is for all ranks",
                                 arguments.threads, ranks->rank(), threads));
  }
  arguments.threads = threads;
  return opened;
}

void expect_data_of_first(lln_torch::Ranks& ranks, const lln_torch::RunModel& made) {
  const std::string own = fingerprint_of(made);
  const std::string first = ranks.from_first("data", own);
  if (own == first) return;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("the data of rank {} are not those of rank 0: {}; expected {}",
                          ranks.rank(), own, first));
}

// A run goes on with the data that it began with, wherever they are now.
void expect_data_of_run(const RunFolder& run, const lln_torch::RunModel& made) {
  const Json facts = run.read_run();
  const std::string own = fingerprint_of(made);
  const std::string begun = facts.value("data_fingerprint", own);
  if (own == begun) return;
  throw Error(ErrorCode::invalid_argument,
              fmt::format("{}: the data are not those that the run began with: {}; expected {}",
                          run.path(), own, begun));
}

int report_not_finite(const std::string& text, const TrainArguments& arguments) {
  if (arguments.json) {
    print_json({{"error", {{"code", "not_finite"}, {"text", text}}}});
  } else {
    fmt::print(stderr, "lln: {}\n", text);
  }
  return kNotFinite;
}

int finish_training(const TrainArguments& arguments, const RunFolder& run,
                    const lln_torch::RunModel& made, lln_torch::TrainEnd end) {
  const auto steps = lln_torch::checkpoint_steps(run.checkpoints());
  const auto state =
      lln_torch::load_run_state(lln_torch::checkpoint_path(run.checkpoints(), steps.back()));
  const bool stopped = end == lln_torch::TrainEnd::signal;
  const char* const how = stopped                             ? "stopped"
                          : end == lln_torch::TrainEnd::early ? "ended early"
                                                              : "finished";
  const std::string metric = made.source->task().metrics.front();
  if (arguments.json) {
    print_json({{"run", run.path()},
                {"end", how},
                {"step", state.step},
                {"metric", metric},
                {"best", state.best ? Json(*state.best) : Json(nullptr)},
                {"best_step", state.best_step},
                {"chance", made.source->task().chance},
                {"parameters", made.parameters},
                {"seconds", state.seconds}});
  } else if (stopped) {
    fmt::print(stderr, "{}: stopped and saved at step {}; lln train --resume --run {} goes on\n",
               run.path(), state.step, run.path());
  } else {
    fmt::print("{}: {} at step {} after {}; best {} {:.4f} at step {} (chance {:.4f})\n",
               run.path(), how, state.step, span_text(state.seconds), metric,
               state.best.value_or(0), state.best_step, made.source->task().chance);
  }
  return stopped ? kStopped : kOk;
}

void check_sequence_ranks(const TrainArguments& arguments, const lln_torch::Ranks* ranks) {
  const int size = ranks != nullptr ? ranks->size() : 1;
  if (size % arguments.sequence_ranks == 0) return;
  throw UsageError(fmt::format("--sequence-ranks {}: expected a divisor of the number of ranks, {}",
                               arguments.sequence_ranks, size));
}

std::string ranks_text(const lln_torch::Ranks* ranks, int together) {
  if (ranks == nullptr) return {};
  const std::string text = fmt::format(" on {} ranks", ranks->size());
  return together == 1 ? text : text + fmt::format(", {} to a row", together);
}

int run_train(TrainArguments arguments, lln_torch::Ranks* ranks, ResumeHint& hint) {
  const bool first = ranks == nullptr || ranks->first();
  check_sequence_ranks(arguments, ranks);
  OpenedRun opened = open_run(arguments, ranks);
  const torch::Device device =
      lln_torch::find_device(arguments.device.empty() ? "cpu" : arguments.device,
                             ranks != nullptr ? ranks->place().local_rank : 0);
  lln_torch::prepare_torch(arguments.threads, device);
  const lln_torch::RunModel made =
      lln_torch::make_run_model(opened.config, arguments.data, device, !opened.begun);
  if (made.settings.step.cuda_graph && device.is_cuda()) {
    if (const std::string why = lln_torch::step_graph_obstacle(); !why.empty()) {
      throw Error(ErrorCode::unsupported, "train.cuda_graph = true: " + why);
    }
  }
  if (ranks != nullptr) expect_data_of_first(*ranks, made);
  if (first && opened.begun) expect_data_of_run(opened.folder, made);
  std::optional<lln_torch::RunLock> lock;
  if (first) {
    opened.folder.make();
    lock.emplace(opened.folder);
  }
  if (first && !opened.begun) {
    opened.folder.write_config(read_text_file(arguments.config), opened.config.resolved(),
                               run_facts(arguments, made, device, ranks ? ranks->size() : 1));
  }
  std::optional<lln_torch::RankGroup> group, sequence;
  if (ranks != nullptr) {
    group = ranks->group("data", device);
    const int together = arguments.sequence_ranks;
    if (together > 1) sequence = ranks->group("sequence", device, together);
  }
  const lln_torch::StopSignals signals;
  lln_torch::CheckpointFiles files;
  TrainLine line(arguments.json || !first);
  line.print(fmt::format("{}: {} on {}, {} parameters, {} steps of {} rows", opened.folder.path(),
                         made.name, made.source->task().name, made.parameters,
                         made.settings.schedule.steps, made.settings.batch) +
             ranks_text(ranks, arguments.sequence_ranks));
  if (made.settings.step.cuda_graph && !device.is_cuda()) {
    line.print("train.cuda_graph has no effect on a CPU");
  }
  for (const std::string& note : made.source->task().notes) line.print(note);
  lln_torch::TrainEvents events;
  events.progress = [&](const lln_torch::TrainProgress& now) { line.progress(now); };
  events.evaluated = [&](const Json& row) { line.evaluated(row); };
  events.warn = [&](const std::string& text) { fmt::print(stderr, "lln: warning: {}\n", text); };
  lln_torch::TrainEnd end{};
  hint.set_checkpoints(opened.folder.checkpoints());
  try {
    end = lln_torch::train({.model = *made.model,
                            .source = *made.source,
                            .settings = made.settings,
                            .run = opened.folder,
                            .device = device,
                            .files = files,
                            .signals = &signals,
                            .group = group ? &*group : nullptr,
                            .sequence = sequence ? &*sequence : nullptr},
                           events);
  } catch (const lln_torch::NotFinite& e) {
    return first ? report_not_finite(e.what(), arguments) : kNotFinite;
  } catch (const c10::OutOfMemoryError& e) {
    throw Error(ErrorCode::out_of_memory, e.what_without_backtrace());
  }
  if (!first) return end == lln_torch::TrainEnd::signal ? kStopped : kOk;
  return finish_training(arguments, opened.folder, made, end);
}

}  // namespace

Verb add_train(CLI::App& program, const std::string& command_line) {
  auto arguments = std::make_shared<TrainArguments>();
  arguments->command = command_line;
  CLI::App* command = program.add_subcommand(
      "train", "Train a model by a config file; resumes where it was stopped");
  command->add_option("CONFIG", arguments->config, "TOML file; docs/training.md lists its keys");
  command
      ->add_option("--set", arguments->sets, "key=value in place of the file's, as train.steps=300")
      ->type_size(1)
      ->allow_extra_args(false);
  command->add_option("--data", arguments->data, "Folder with the data of the task");
  command->add_option("--run", arguments->run,
                      "Folder of the run; otherwise runs/ and the name of CONFIG");
  command->add_flag("--resume", arguments->resume, "Go on with the run; begin where there is none");
  command->add_option("--device", arguments->device, "cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  command
      ->add_option("--sequence-ranks", arguments->sequence_ranks,
                   "Of several ranks: how many share each row, piece by piece")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command
      ->add_option("--rank-timeout", arguments->rank_timeout,
                   "Of several ranks: seconds until one that is silent ends all")
      ->check(CLI::Range(1.0, 1e6))
      ->capture_default_str();
  add_threads_option(*command, arguments->threads);
  add_json_option(*command, arguments->json);
  command->footer(
      "SIGINT and SIGTERM save a checkpoint and end with exit code 6; a second one ends at once.\n"
      "A loss or gradient that is not finite ends with exit code 7.\n"
      "Started by torchrun it trains on several ranks (docs/scale.md); exit code 8: one is "
      "lost.\n\n" +
      help_footer("  lln train examples/configs/mlm-tiny.toml --data my_tokens --run runs/first\n"
                  "  lln train --resume --run runs/first\n"
                  "  lln train mlm.toml --set attention.name=softmax --set train.steps=300\n"));
  return {command, [arguments] {
            return train_among_ranks(arguments->rank_timeout, arguments->json,
                                     [&](lln_torch::Ranks* ranks, ResumeHint& hint) {
                                       return run_train(*arguments, ranks, hint);
                                     });
          }};
}

}  // namespace lln::cli
