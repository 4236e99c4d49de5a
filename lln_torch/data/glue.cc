// Tables of tasks and the reading of one line. No file of GLUE quotes anything: a quotation mark is
// part of the text, wherever it stands.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/data/glue.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>

#include "io/printable.h"

namespace lln_torch {
namespace {

constexpr const char* kPartOfOfficial = "subset";

GlueTask accuracy_task(const char* name, const char* folder, const char* first,
                       const char* second) {
  return {.name = name,
          .folder = folder,
          .first = {first},
          .second = {second},
          .label = {"label"},
          .labels = {"entailment", "not_entailment"},
          .metrics = {"accuracy"},
          .train = {{"train.tsv"}},
          .validation = {{"dev.tsv"}},
          .test = {}};
}

std::vector<GlueTask> make_glue_tasks() {
  const GlueFile::Columns cola = {.first = 3, .label = 1, .least = 4};
  const GlueFile::Columns sts = {.first = 5, .second = 6, .label = 4, .least = 7};
  GlueTask rte = accuracy_task("rte", "RTE", "sentence1", "sentence2");
  GlueTask qnli = accuracy_task("qnli", "QNLI", "question", "sentence");
  qnli.train.push_back({"train_reconstructed.tsv", {}, "reconstructed"});
  return {
      {.name = "sst2",
       .folder = "SST-2",
       .first = {"sentence"},
       .second = {},
       .label = {"label"},
       .labels = {"0", "1"},
       .metrics = {"accuracy"},
       .train = {{"train.tsv"}},
       .validation = {{"dev.tsv"}},
       .test = {}},
      {.name = "cola",
       .folder = "CoLA",
       .first = {},
       .second = {},
       .label = {},
       .labels = {"0", "1"},
       .metrics = {"matthews", "accuracy"},
       .train = {{"train.tsv", cola}},
       .validation = {{"dev.tsv", cola}},
       .test = {}},
      std::move(rte),
      {.name = "mrpc",
       .folder = "MRPC",
       .first = {"#1 String"},
       .second = {"#2 String"},
       .label = {"Quality"},
       .labels = {"0", "1"},
       .metrics = {"accuracy", "f1"},
       // GLUE's dev.tsv is a part of the authors' file for training.
       .train = {{"train.tsv", {}, nullptr, "dev.tsv"},
                 {"msr_paraphrase_train.txt", {}, "whole files", "msr_paraphrase_test.txt"}},
       .validation = {{"dev.tsv"}, {"msr_paraphrase_test.txt"}},
       .test = {{"msr_paraphrase_test.txt"}}},
      {.name = "stsb",
       .folder = "STS-B",
       .first = {"sentence1"},
       .second = {"sentence2"},
       .label = {"score"},
       .labels = {},
       .metrics = {"pearson", "spearman"},
       .train = {{"train.tsv"}, {"sts-train.csv", sts}},
       .validation = {{"dev.tsv"}, {"sts-dev.csv", sts}},
       .test = {{"sts-test.csv", sts}}},
      {.name = "mnli",
       .folder = "MNLI",
       .first = {"sentence1", "premise"},
       .second = {"sentence2", "hypothesis"},
       .label = {"gold_label", "label"},
       .labels = {"entailment", "neutral", "contradiction"},
       .metrics = {"accuracy"},
       .train = {{"train.tsv"}, {"train_subset.tsv", {}, kPartOfOfficial}},
       .validation = {{"dev_matched.tsv"}},
       .test = {{"dev_mismatched.tsv"}}},
      std::move(qnli),
      {.name = "qqp",
       .folder = "QQP",
       .first = {"question1"},
       .second = {"question2"},
       .label = {"is_duplicate"},
       .labels = {"0", "1"},
       .metrics = {"accuracy", "f1"},
       .train = {{"train.tsv"}, {"train_subset.tsv", {}, kPartOfOfficial}},
       .validation = {{"dev.tsv"}, {"dev_subset.tsv", {}, kPartOfOfficial}},
       .test = {}},
  };
}

// The columns that a header names.
GlueFile::Columns header_columns(const GlueTask& task, const TextLines& lines,
                                 const std::vector<std::string_view>& names) {
  const auto find = [&](const std::vector<const char*>& wanted) {
    for (const char* name : wanted) {
      const auto place = std::find(names.begin(), names.end(), name);
      if (place != names.end()) return static_cast<int>(place - names.begin());
    }
    if (!wanted.empty()) {
      lines.fail(fmt::format("expected a header with the column {}, found {}",
                             fmt::join(wanted, " or "), fmt::join(names, ", ")));
    }
    return -1;
  };
  return {find(task.first), find(task.second), find(task.label), static_cast<int>(names.size())};
}

// What is wrong with the label, empty where nothing is.
std::string read_label(const GlueTask& task, std::string_view text, GlueExample& example) {
  if (!task.labels.empty()) {
    const auto found = std::find(task.labels.begin(), task.labels.end(), text);
    if (found == task.labels.end()) {
      return fmt::format("expected the label {}, found {}", fmt::join(task.labels, " or "),
                         lln::io::printable(text));
    }
    example.label = static_cast<std::int32_t>(found - task.labels.begin());
    return {};
  }
  const std::string number(text);
  char* end = nullptr;
  example.score = std::strtof(number.c_str(), &end);
  if (number.empty() || *end != '\0' ||
      !(example.score >= 0 && example.score <= kLargestGlueScore)) {
    return fmt::format("expected a score of 0 to {}, found {}", kLargestGlueScore,
                       lln::io::printable(text));
  }
  return {};
}

// What is wrong with the record, empty where nothing is. A line has exactly the columns of the
// header; without one at least those that are read.
std::string read_record(const GlueTask& task, const GlueFile::Columns& columns, bool header,
                        std::string_view line, GlueExample& example) {
  const std::vector<std::string_view> fields = split_tabs(line);
  const int count = static_cast<int>(fields.size());
  if (header ? count != columns.least : count < columns.least) {
    return fmt::format("expected {}{} columns, found {}", header ? "" : "at least ", columns.least,
                       count);
  }
  if (!is_utf8(line)) return "not UTF-8";
  example.first = fields[static_cast<std::size_t>(columns.first)];
  if (columns.second >= 0) example.second = fields[static_cast<std::size_t>(columns.second)];
  if (example.first.empty() && example.second.empty()) return "no text";
  return read_label(task, fields[static_cast<std::size_t>(columns.label)], example);
}

}  // namespace

const std::vector<GlueTask>& glue_tasks() {
  static const std::vector<GlueTask> tasks = make_glue_tasks();
  return tasks;
}

std::int64_t read_glue(const GlueTask& task, const GlueFile& file, TextLines& lines,
                       bool skip_corrupt, const std::function<void(GlueExample&&)>& each) {
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";
  const bool header = file.columns.least == 0;
  GlueFile::Columns columns = file.columns;
  std::int64_t corrupt = 0;
  std::string_view line;
  while (lines.next(line)) {
    if (lines.number() == 1 && line.starts_with(kByteOrderMark)) {
      line.remove_prefix(kByteOrderMark.size());
    }
    if (header && lines.number() == 1) {
      columns = header_columns(task, lines, split_tabs(line));
      continue;
    }
    GlueExample example;
    const std::string fault = read_record(task, columns, header, line, example);
    if (fault.empty()) {
      each(std::move(example));
    } else if (skip_corrupt) {
      ++corrupt;
    } else {
      lines.fail(fault + " (skip_corrupt = true leaves such records out)");
    }
  }
  return corrupt;
}

}  // namespace lln_torch
