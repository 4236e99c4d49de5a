// Examples of a task in plain memory, and where they come from. No torch: what reads, generates and
// masks data can be built and tested without it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace lln_torch {

class Settings;
class Tokenizer;

// What is predicted, and from what; it chooses the head of the model, the loss and the metrics.
enum class TaskKind {
  masked_tokens,  // ids with some hidden; labels [rows, tokens]
  next_token,     // ids; labels [rows, tokens], of the token that follows
  classes,        // ids (one text, or two in one row), or pixels; labels [rows]
  score,          // ids; scores [rows]
  matched_pair,   // two texts in two rows, ids and second; labels [rows]: do they belong together
  embedding,      // two texts in two rows; scores [rows] of their similarity, or labels
};

struct Task {
  std::string name;
  TaskKind kind = TaskKind::classes;
  std::int64_t classes = 0;     // of TaskKind::classes and matched_pair
  double score_range = 1;       // the largest score of TaskKind::score and embedding
  std::int64_t vocabulary = 0;  // of ids; 0 where a batch holds pixels
  std::int64_t max_tokens = 0;  // the longest row
  std::int64_t pad_id = 0;
  // Of pixels: a model cuts them into patches, or reads them one by one (patch 1).
  std::int64_t channels = 0;
  std::int64_t height = 0;
  std::int64_t width = 0;
  // Of masked tokens: the share of tokens that is predicted, on average.
  double predicted_share = 1;
  // The metrics of the validation, the one that chooses the best checkpoint first ("accuracy",
  // "f1", "matthews", "pearson", "spearman", "loss").
  std::vector<std::string> metrics;
  // What a model that learned nothing reaches, printed beside every result: the share of the most
  // frequent class, or the loss of the best constant prediction (unigram).
  double chance = 0;
  std::string chance_text;
  // What whoever trains on it should know: records left out, one text each.
  std::vector<std::string> notes;
  // For people: the names of the classes (empty: numbers), and ids as text (empty: numbers).
  std::vector<std::string> class_names;
  std::function<std::string(std::span<const std::int32_t>)> text_of_ids;
};

constexpr std::int32_t kIgnoredLabel = -100;

// Texts of one batch, padded on the right: [rows, tokens].
struct TextRows {
  std::int64_t tokens = 0;
  std::vector<std::int32_t> ids;
  std::vector<std::uint8_t> mask;      // 1 where a token counts; empty: all do
  std::vector<std::int32_t> segments;  // 0 or 1 of sentence pairs in one row; empty: all 0
};

struct Batch {
  std::int64_t rows = 0;
  TextRows text;
  TextRows second;                   // of matched_pair and embedding
  std::vector<float> pixels;         // [rows, channels, height, width]
  std::vector<std::int32_t> labels;  // [rows], or [rows, tokens] with kIgnoredLabel
  std::vector<float> scores;         // [rows]
};

// Examples for training and for validation. All calls are const, re-entrant and functions of their
// arguments and of the seed alone: a batch depends on its step, not on the batches asked for
// before, so a run resumes with nothing but the number of its step, and ranks read their rows of
// one batch.
class Source {
 public:
  virtual ~Source() = default;
  virtual const Task& task() const = 0;
  // Rows first to first + rows of the `batch_rows` rows of batch `step`. An epoch shows every
  // example once, in an order of its own.
  virtual Batch train_batch(std::int64_t step, std::int64_t batch_rows, std::int64_t first,
                            std::int64_t rows) const = 0;
  virtual std::int64_t validation_rows() const = 0;
  // Rows of the validation set, the same at every call: nothing of it is random.
  virtual Batch validation_batch(std::int64_t first, std::int64_t rows) const = 0;
  // Steps of `batch_rows` rows after which every example was shown once.
  virtual double steps_per_epoch(std::int64_t batch_rows) const = 0;
  // What ids stand for, for those who show them as text; null where they are no text.
  virtual const Tokenizer* tokenizer() const { return nullptr; }
};

// The source that the table [data] of a config names by its key `task`; `folder` is what --data
// gives, for tasks that read files.
std::unique_ptr<Source> make_source(const Settings& data, const std::string& folder);

}  // namespace lln_torch
