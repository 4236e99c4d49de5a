// The task "imdb": is a review of a film positive? Read byte by byte, up to 4096 of them, as in
// Long Range Arena's Text. From imdb.{train,test}.tsv (also compressed), the folder aclImdb or its
// archive.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <fstream>

#include "io/printable.h"
#include "lln/error.h"
#include "lln_torch/config/settings.h"
#include "lln_torch/data/preview.h"
#include "lln_torch/data/text_examples.h"
#include "lln_torch/data/text_lines.h"
#include "lln_torch/data/text_sources.h"

namespace lln_torch {
namespace {

namespace fs = std::filesystem;

constexpr std::array kReviewEndings = {".tsv.xz", ".tsv.gz", ".tsv"};
constexpr std::array kReviewArchives = {"aclImdb_v1.tar.gz", "aclImdb.tar.gz", "aclImdb.tar.xz"};

struct Review {
  std::string text;
  std::int32_t label = 0;
};

// Header "label rating id text"; a quotation mark is part of the text.
std::vector<Review> read_review_table(const std::string& path) {
  TextLines lines(path);
  std::string_view line;
  if (!lines.next(line) || line != "label\trating\tid\ttext") {
    lines.fail("expected the header label, rating, id, text with tabs between");
  }
  std::vector<Review> reviews;
  while (lines.next(line)) {
    const std::vector<std::string_view> fields = split_tabs(line);
    if (fields.size() != 4) lines.fail(fmt::format("expected 4 columns, found {}", fields.size()));
    if (fields[0] != "0" && fields[0] != "1") {
      lines.fail(fmt::format("expected the label 0 or 1, found {}", lln::io::printable(fields[0])));
    }
    if (fields[3].empty()) lines.fail("no text");
    reviews.push_back({std::string(fields[3]), fields[0] == "1" ? 1 : 0});
  }
  return reviews;
}

// The label of "aclImdb/train/pos/0_9.txt" in the split "train"; -1 where it is no review of it.
std::int32_t review_label(std::string_view name, const std::string& split) {
  if (!name.ends_with(".txt")) return -1;
  for (const std::int32_t label : {0, 1}) {
    const std::string folder = fmt::format("{}/{}/", split, label == 1 ? "pos" : "neg");
    if (name.find("/" + folder) != std::string_view::npos || name.starts_with(folder)) return label;
  }
  return -1;
}

// Reviews by the order of their names: a folder has none.
std::vector<Review> sorted_reviews(std::vector<std::pair<std::string, Review>> named) {
  std::sort(named.begin(), named.end(),
            [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Review> reviews;
  for (auto& [name, review] : named) {
    if (review.text.empty()) {
      throw lln::Error(lln::ErrorCode::io, fmt::format("{}:1: no text", name));
    }
    reviews.push_back(std::move(review));
  }
  return reviews;
}

std::vector<Review> read_review_folder(const fs::path& folder, const std::string& split) {
  std::vector<std::pair<std::string, Review>> named;
  for (const std::int32_t label : {0, 1}) {
    const fs::path part = folder / split / (label == 1 ? "pos" : "neg");
    std::error_code code;
    for (const fs::directory_entry& entry : fs::directory_iterator(part, code)) {
      if (entry.path().extension() != ".txt") continue;
      std::ifstream file(entry.path(), std::ios::binary);
      std::string text((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
      if (file.bad())
        throw lln::Error(lln::ErrorCode::io, entry.path().string() + ": cannot be read");
      named.emplace_back(entry.path().string(), Review{std::move(text), label});
    }
    if (code) {
      throw lln::Error(lln::ErrorCode::io, fmt::format("{}: {}", part.string(), code.message()));
    }
  }
  return sorted_reviews(std::move(named));
}

std::vector<Review> read_review_archive(const std::string& archive, const std::string& split) {
  std::vector<std::pair<std::string, Review>> named;
  read_archive(
      archive, [&](const std::string& name) { return review_label(name, split) >= 0; },
      [&](const std::string& name, std::string&& content) {
        named.emplace_back(archive + "/" + name,
                           Review{std::move(content), review_label(name, split)});
      });
  return sorted_reviews(std::move(named));
}

std::vector<Review> read_reviews(const std::string& folder, const std::string& split) {
  for (const char* ending : kReviewEndings) {
    const fs::path path = fs::path(folder) / fmt::format("imdb.{}{}", split, ending);
    if (fs::is_regular_file(path)) return read_review_table(path.string());
  }
  for (const fs::path& parent : {fs::path(folder) / "aclImdb", fs::path(folder)}) {
    if (fs::is_directory(parent / split / "pos")) return read_review_folder(parent, split);
  }
  for (const char* name : kReviewArchives) {
    const fs::path path = fs::path(folder) / name;
    if (fs::is_regular_file(path)) return read_review_archive(path.string(), split);
  }
  throw lln::Error(lln::ErrorCode::io,
                   fmt::format("{}: expected imdb.{}.tsv.xz, the folder aclImdb or "
                               "aclImdb_v1.tar.gz; docs/data.md says how to obtain it",
                               folder.empty() ? "." : folder, split));
}

TextExamples encode_reviews(const std::vector<Review>& reviews, const Tokenizer& bytes,
                            std::int64_t tokens, bool start_token) {
  TextExamples examples(bytes.vocabulary());
  for (const Review& review : reviews) {
    EncodedRow row;
    if (start_token) row.ids.push_back(bytes.special().start);
    const std::vector<std::int32_t> ids = bytes.encode(
        std::string_view(review.text).substr(0, static_cast<std::size_t>(tokens) - row.ids.size()));
    row.ids.insert(row.ids.end(), ids.begin(), ids.end());
    row.first_segment = static_cast<std::int64_t>(row.ids.size());
    examples.add(row, review.label, 0);
  }
  return examples;
}

}  // namespace

std::unique_ptr<Source> make_imdb_source(const Settings& data, const std::string& folder) {
  const TextSourceOptions options = text_source_options(data);
  const std::int64_t tokens = data.integer("tokens", 4096, 16, std::int64_t{1} << 20);
  const bool start_token = data.flag("start_token", false);
  const std::shared_ptr<const Tokenizer> bytes = byte_tokenizer();
  TextExamples train = encode_reviews(read_reviews(folder, "train"), *bytes, tokens, start_token);
  TextExamples validation =
      encode_reviews(read_reviews(folder, "test"), *bytes, tokens, start_token);
  for (const TextExamples* part : {&train, &validation}) {
    if (part->ids.rows() == 0) {
      throw lln::Error(lln::ErrorCode::io, folder + ": IMDb: a file or folder without reviews");
    }
  }
  Task task;
  task.name = "imdb";
  task.kind = TaskKind::classes;
  task.classes = 2;
  task.vocabulary = bytes->vocabulary();
  task.max_tokens = tokens;
  task.pad_id = bytes->special().pad;
  task.class_names = {"negative", "positive"};
  task.text_of_ids = text_by(bytes);
  task.metrics = {"accuracy"};
  set_class_chance(task, validation);
  return make_example_source(std::move(task), std::move(train), std::move(validation), options);
}

}  // namespace lln_torch
