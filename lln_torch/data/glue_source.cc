// GLUE's tasks as sources: their files found in a folder or an archive, tokenised, one row for each
// example.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include "lln/error.h"
#include "lln_torch/config/settings.h"
#include "lln_torch/data/glue.h"
#include "lln_torch/data/preview.h"
#include "lln_torch/data/text_examples.h"
#include "lln_torch/data/text_sources.h"
#include "lln_torch/data/word_memory.h"

namespace lln_torch {
namespace {

namespace fs = std::filesystem;

// Where the folders of the tasks are looked for under --data, and in which archives.
constexpr const char* kGlueFolders[] = {"", "glue", "glue_data", "GLUE"};
constexpr const char* kGlueArchives[] = {"glue.tar.xz", "glue.tar.gz", "glue.tar", "glue.zip",
                                         "glue_data.zip"};

// One file of a task that is there.
struct FoundGlueFile {
  GlueFile file;
  std::string path;    // of the file, or of the archive it is in
  std::string member;  // "" where it is a file of its own

  std::unique_ptr<TextLines> open() const {
    return member.empty() ? std::make_unique<TextLines>(path)
                          : std::make_unique<TextLines>(path, member);
  }
};

// Finds the files of one task; an archive is listed once.
class GlueFinder {
 public:
  GlueFinder(const GlueTask& task, std::string folder) : task_(task), folder_(std::move(folder)) {}

  std::optional<FoundGlueFile> find(const std::vector<GlueFile>& candidates) {
    for (const GlueFile& file : candidates) {
      for (const char* parent : kGlueFolders) {
        const fs::path path = fs::path(folder_) / parent / task_.folder / file.name;
        if (fs::is_regular_file(path)) return FoundGlueFile{file, path.string(), ""};
      }
    }
    for (const char* name : kGlueArchives) {
      const fs::path archive = fs::path(folder_) / name;
      if (!fs::is_regular_file(archive)) continue;
      if (members_.empty()) members_ = archive_members(archive.string());
      for (const GlueFile& file : candidates) {
        const std::string wanted = std::string(task_.folder) + "/" + file.name;
        for (const std::string& member : members_) {
          if (member == wanted || member.ends_with("/" + wanted)) {
            return FoundGlueFile{file, archive.string(), member};
          }
        }
      }
      return std::nullopt;
    }
    return std::nullopt;
  }

  FoundGlueFile need(const std::vector<GlueFile>& candidates) {
    if (std::optional<FoundGlueFile> found = find(candidates)) return *found;
    std::vector<std::string> names;
    for (const GlueFile& file : candidates) {
      names.push_back(fmt::format("{}/{}", task_.folder, file.name));
    }
    throw lln::Error(lln::ErrorCode::io,
                     fmt::format("{}: expected {} there, in glue, in glue_data or in glue.tar.xz; "
                                 "docs/data.md says how to obtain it",
                                 folder_.empty() ? "." : folder_, fmt::join(names, " or ")));
  }

 private:
  const GlueTask& task_;
  std::string folder_;
  std::vector<std::string> members_;
};

struct GlueFilePair {
  FoundGlueFile train, validation;
};

// The first file for training that is there with a file of the validation that goes with it.
GlueFilePair find_glue_pair(const GlueTask& task, GlueFinder& finder, bool test) {
  const auto partners = [&](const GlueFile& train) {
    if (test) return task.test;
    std::vector<GlueFile> files = task.validation;
    std::erase_if(files, [&](const GlueFile& file) {
      return train.partner != nullptr && std::string_view(file.name) != train.partner;
    });
    return files;
  };
  for (const GlueFile& candidate : task.train) {
    const std::optional<FoundGlueFile> train = finder.find({candidate});
    if (!train) continue;
    if (const auto validation = finder.find(partners(candidate))) return {*train, *validation};
  }
  const FoundGlueFile train = finder.need(task.train);
  return {train, finder.need(partners(train.file))};
}

struct GlueRows {
  std::int64_t tokens = 0;  // the longest row
  bool apart = false;       // the two texts of a pair are rows of their own
  bool skip_corrupt = false;
};

TextExamples read_glue_examples(const GlueTask& task, const FoundGlueFile& file,
                                const Tokenizer& tokenizer, const GlueRows& rows,
                                std::vector<std::string>& notes) {
  TextExamples examples(tokenizer.vocabulary());
  const bool pair = !task.second.empty() && !rows.apart;
  WordMemory memory;
  const std::unique_ptr<TextLines> lines = file.open();
  const std::int64_t corrupt =
      read_glue(task, file.file, *lines, rows.skip_corrupt, [&](GlueExample&& example) {
        std::vector<std::int32_t> first, second;
        memory.encode(tokenizer, example.first, first);
        if (!task.second.empty()) memory.encode(tokenizer, example.second, second);
        if (rows.apart) {
          const EncodedRow row =
              make_row(tokenizer.special(), std::exchange(second, {}), {}, false, rows.tokens);
          examples.second.add(row.ids);
        }
        const EncodedRow row =
            make_row(tokenizer.special(), std::move(first), std::move(second), pair, rows.tokens);
        examples.add(row, example.label, example.score);
      });
  if (examples.ids.rows() == 0) {
    throw lln::Error(lln::ErrorCode::io, lines->name() + ": has no examples");
  }
  if (corrupt > 0) {
    notes.push_back(fmt::format("{}: {} corrupt records of {} left out", lines->name(), corrupt,
                                corrupt + examples.ids.rows()));
  }
  return examples;
}

const GlueTask& glue_task(const std::string& name) {
  for (const GlueTask& task : glue_tasks()) {
    if (task.name == name) return task;
  }
  throw lln::Error(lln::ErrorCode::internal, fmt::format("{} is no task of GLUE", name));
}

}  // namespace

std::unique_ptr<Source> make_glue_source(const Settings& data, const std::string& folder) {
  const GlueTask& glue = glue_task(data.text("task", ""));
  const std::shared_ptr<const Tokenizer> tokenizer = data_tokenizer(data, folder);
  const TextSourceOptions options = text_source_options(data);
  GlueRows rows;
  rows.tokens = data.integer("tokens", 128, 8, std::int64_t{1} << 20);
  rows.skip_corrupt = data.flag("skip_corrupt", false);
  rows.apart = !glue.second.empty() && data.flag("apart", false);
  const std::string split = data.choice("validation_split", "validation", {"validation", "test"});
  if (split == "test" && glue.test.empty()) {
    data.refuse("validation_split", "validation: GLUE keeps the labels of this test set to itself");
  }
  GlueFinder finder(glue, folder);
  const GlueFilePair files = find_glue_pair(glue, finder, split == "test");
  Task task;
  TextExamples train = read_glue_examples(glue, files.train, *tokenizer, rows, task.notes);
  TextExamples validation =
      read_glue_examples(glue, files.validation, *tokenizer, rows, task.notes);

  task.name = glue.name;
  const char* subset =
      files.train.file.subset != nullptr ? files.train.file.subset : files.validation.file.subset;
  if (subset != nullptr) task.name += fmt::format(" ({})", subset);
  const bool scored = glue.labels.empty();
  task.kind = rows.apart ? (scored ? TaskKind::embedding : TaskKind::matched_pair)
                         : (scored ? TaskKind::score : TaskKind::classes);
  if (scored) task.score_range = kLargestGlueScore;
  task.classes = static_cast<std::int64_t>(glue.labels.size());
  task.vocabulary = tokenizer->vocabulary();
  task.max_tokens = rows.tokens;
  task.pad_id = tokenizer->special().pad;
  task.class_names.assign(glue.labels.begin(), glue.labels.end());
  task.text_of_ids = text_by(tokenizer);
  task.metrics.assign(glue.metrics.begin(), glue.metrics.end());
  if (!scored) {
    set_class_chance(task, validation);
  } else {
    task.chance_text = "a constant correlates with nothing";
  }
  return make_example_source(std::move(task), std::move(train), std::move(validation), options);
}

}  // namespace lln_torch
