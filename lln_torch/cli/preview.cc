// lln preview: examples of a task as a model sees them, written for people.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <chrono>
#include <filesystem>
#include <fstream>
#include <memory>
#include <nlohmann/json.hpp>

#include "lln/error.h"
#include "lln_torch/cli/verbs.h"
#include "lln_torch/config/settings.h"
#include "lln_torch/data/preview.h"

namespace lln::cli {
namespace {

using lln_torch::PreviewPicture;
using lln_torch::PreviewRow;
using lln_torch::Settings;

struct PreviewOptions {
  std::string task;  // or a config
  std::string data;
  std::string pictures;
  std::vector<std::string> assignments;
  std::int64_t rows = 4;
  std::int64_t step = 0;
  bool validation = false;
  bool json = false;
};

// The table [data] of a config, or one with the task alone; --set works as for lln train.
Settings data_settings(const PreviewOptions& options) {
  const bool config = options.task.ends_with(".toml");
  Settings all = config ? Settings::from_file(options.task) : Settings();
  if (!config) all.set("data.task=\"" + options.task + "\"");
  for (const std::string& assignment : options.assignments) {
    all.set(assignment.starts_with("data.") ? assignment : "data." + assignment);
  }
  return all.table("data");
}

std::string write_picture(const PreviewOptions& options, std::size_t row,
                          const PreviewPicture& picture) {
  const std::filesystem::path path =
      std::filesystem::path(options.pictures) /
      fmt::format("{}-{}.{}", options.validation ? "validation" : "train", row,
                  picture.channels == 3 ? "ppm" : "pgm");
  const std::string bytes = lln_torch::picture_as_pnm(picture);
  std::ofstream file(path, std::ios::binary);
  file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  file.close();
  if (!file) throw Error(ErrorCode::io, fmt::format("{}: cannot be written", path.string()));
  return path.string();
}

Json row_json(const PreviewRow& row, const std::string& picture) {
  Json value = {{"label", row.label}};
  if (row.tokens > 0) value["tokens"] = row.tokens;
  if (!row.text.empty()) value["text"] = row.text;
  if (!row.second.empty()) value["second"] = row.second;
  if (row.picture.channels > 0) {
    value["shape"] = {row.picture.channels, row.picture.height, row.picture.width};
  }
  if (!picture.empty()) value["picture"] = picture;
  return value;
}

std::string row_text(std::size_t number, const PreviewRow& row, const std::string& picture) {
  std::string text = fmt::format("\n{}  label {}", number, row.label);
  if (row.tokens > 0) text += fmt::format("   {} tokens", row.tokens);
  if (!picture.empty()) text += "   " + picture;
  text += "\n";
  if (row.picture.channels > 0) {
    if (picture.empty()) text += lln_torch::picture_as_text(row.picture);
    return text;
  }
  text += row.text + "\n";
  if (!row.second.empty()) text += "and\n" + row.second + "\n";
  return text;
}

std::string source_text(const lln_torch::Source& source, double opened, double batch_seconds,
                        std::int64_t rows) {
  const lln_torch::Task& task = source.task();
  std::string shape =
      task.vocabulary > 0
          ? fmt::format("vocabulary {}, up to {} tokens", task.vocabulary, task.max_tokens)
          : fmt::format("{} x {} x {} pixels", task.channels, task.height, task.width);
  if (task.classes > 0) shape += fmt::format(", {} classes", task.classes);
  std::string text = fmt::format(
      "{}: {}\n  {:.0f} rows to train on, {} to validate\n  by chance: {}\n"
      "  opened in {}, {} rows made in {}\n",
      task.name, shape, source.steps_per_epoch(1), source.validation_rows(),
      task.chance_text.empty() ? fmt::format("{:.4g}", task.chance) : task.chance_text,
      time_text(opened), rows, time_text(batch_seconds));
  for (const std::string& note : task.notes) text += fmt::format("  {}\n", note);
  return text;
}

int run_preview(const PreviewOptions& options) {
  using Clock = std::chrono::steady_clock;
  const auto seconds = [](Clock::time_point from) {
    return std::chrono::duration<double>(Clock::now() - from).count();
  };
  const Settings data = data_settings(options);
  const Clock::time_point start = Clock::now();
  const std::unique_ptr<lln_torch::Source> source = make_source(data, options.data);
  data.finish();
  const double opened = seconds(start);
  if (!options.pictures.empty()) std::filesystem::create_directories(options.pictures);

  const Clock::time_point asked = Clock::now();
  const lln_torch::Batch batch =
      options.validation
          ? source->validation_batch(0, std::min(options.rows, source->validation_rows()))
          : source->train_batch(options.step, options.rows, 0, options.rows);
  const double batch_seconds = seconds(asked);
  Json rows = Json::array();
  std::string text = source_text(*source, opened, batch_seconds, batch.rows);
  for (std::int64_t i = 0; i < batch.rows; ++i) {
    const auto number = static_cast<std::size_t>(i);
    const PreviewRow row = preview_row(source->task(), batch, i);
    const bool file = row.picture.channels > 0 && !options.pictures.empty();
    const std::string picture = file ? write_picture(options, number, row.picture) : "";
    rows.push_back(row_json(row, picture));
    text += row_text(number, row, picture);
  }
  if (options.json) {
    const lln_torch::Task& task = source->task();
    print_json({{"task", task.name},
                {"vocabulary", task.vocabulary},
                {"max_tokens", task.max_tokens},
                {"classes", task.classes},
                {"train_rows", source->steps_per_epoch(1)},
                {"validation_rows", source->validation_rows()},
                {"chance", task.chance},
                {"chance_text", task.chance_text},
                {"notes", task.notes},
                {"seconds_to_open", opened},
                {"seconds_for_the_batch", batch_seconds},
                {"rows", rows}});
  } else {
    fmt::print("{}", text);
  }
  return kOk;
}

}  // namespace

Verb add_preview(CLI::App& program) {
  const auto options = std::make_shared<PreviewOptions>();
  CLI::App* command =
      program.add_subcommand("preview", "Show examples of a task as a model sees them");
  command
      ->add_option("TASK", options->task,
                   "The task (a wrong name lists all), or a config with a table [data]")
      ->required();
  command->add_option("--data", options->data, "The folder that the task reads");
  command->add_option("--rows", options->rows, "How many rows")
      ->check(CLI::Range(1, 4096))
      ->capture_default_str();
  command->add_option("--step", options->step, "Which batch of the training")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_flag("--validation", options->validation,
                    "The first rows of the validation set instead");
  command->add_option("--set", options->assignments, "A setting of [data], as size=96; repeatable")
      ->expected(1)
      ->take_all();
  command->add_option("--pictures", options->pictures,
                      "Write pictures into this folder, as .pgm or .ppm");
  add_json_option(*command, options->json);
  command->footer(
      help_footer("  lln preview listops --rows 2\n"
                  "  lln preview images --data photos --set size=96 --pictures build/look\n"
                  "  lln preview run.toml --data corpus --validation\n"));
  return {command, [options] { return run_preview(*options); }};
}

}  // namespace lln::cli
