// The task "wiki-pairs", ours: do two passages of 4,000 bytes come from one article? It asks of a
// model what Long Range Arena's Retrieval asks, with text that anybody can have. Articles are cut
// into passages of one length; those with a single one are left out, because they could only be
// seen in pairs that do not match.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <algorithm>

#include "lln/error.h"
#include "lln_torch/config/settings.h"
#include "lln_torch/data/documents.h"
#include "lln_torch/data/example_order.h"
#include "lln_torch/data/preview.h"
#include "lln_torch/data/random.h"
#include "lln_torch/data/text_sources.h"

namespace lln_torch {
namespace {

// Which articles are held out, and the pairs made of them, are the same in every run.
constexpr std::uint64_t kHeldOutSeed = 0;

// Passages of one length, those of an article side by side.
class Passages {
 public:
  explicit Passages(std::int64_t bytes) : bytes_(bytes) {}

  void add_article(const std::string& text) {
    const std::int64_t count = static_cast<std::int64_t>(text.size()) / bytes_;
    if (count < 2) return;
    text_.append(text, 0, static_cast<std::size_t>(count * bytes_));
    const auto article = static_cast<std::int32_t>(starts_.size() - 1);
    articles_.insert(articles_.end(), static_cast<std::size_t>(count), article);
    starts_.push_back(starts_.back() + count);
  }

  std::int64_t count() const { return starts_.back(); }
  std::int64_t articles() const { return static_cast<std::int64_t>(starts_.size()) - 1; }
  std::string_view operator[](std::int64_t passage) const {
    return std::string_view(text_).substr(static_cast<std::size_t>(passage * bytes_),
                                          static_cast<std::size_t>(bytes_));
  }

  // The other half of a pair: of the same article, but not the passage itself, or of another
  // article. Every passage is as likely to be seen in one as in the other.
  std::int64_t partner(std::int64_t passage, bool same, Random& random) const {
    const auto article = static_cast<std::size_t>(articles_[static_cast<std::size_t>(passage)]);
    const std::int64_t begin = starts_[article], end = starts_[article + 1];
    if (same) {
      const std::int64_t other = begin + random.below(end - begin - 1);
      return other + (other >= passage ? 1 : 0);
    }
    const std::int64_t other = random.below(count() - (end - begin));
    return other < begin ? other : other + (end - begin);
  }

 private:
  std::int64_t bytes_;
  std::string text_;
  std::vector<std::int64_t> starts_ = {0};  // first passage of every article, and the end
  std::vector<std::int32_t> articles_;      // of every passage
};

struct PassagePair {
  std::int64_t first = 0;
  std::int64_t second = 0;
  std::int32_t label = 0;
};

class WikiPairSource final : public Source {
 public:
  WikiPairSource(Passages train, Passages validation, std::int64_t bytes, std::uint64_t seed)
      : train_(std::move(train)),
        validation_(std::move(validation)),
        seed_(seed),
        order_(seed, train_.count()),
        tokenizer_(byte_tokenizer()) {
    task_.name = "wiki-pairs";
    task_.kind = TaskKind::matched_pair;
    task_.classes = 2;
    task_.vocabulary = tokenizer_->vocabulary();
    task_.max_tokens = bytes;
    task_.pad_id = tokenizer_->special().pad;
    task_.class_names = {"apart", "one article"};
    task_.text_of_ids = text_by(tokenizer_);
    task_.metrics = {"accuracy"};
    task_.chance = 0.5;
    task_.chance_text = "half of the pairs match";
  }

  const Task& task() const override { return task_; }
  // Every passage once with a partner that matches, once with one that does not.
  std::int64_t validation_rows() const override { return 2 * validation_.count(); }
  double steps_per_epoch(std::int64_t batch_rows) const override {
    return order_.steps_per_epoch(batch_rows);
  }

  Batch train_batch(std::int64_t step, std::int64_t batch_rows, std::int64_t first,
                    std::int64_t rows) const override {
    std::vector<PassagePair> pairs;
    for (const OrderedRow& row : order_.rows(step, batch_rows, first, rows)) {
      Random random(seed_, Stream("wiki-pairs"), static_cast<std::uint64_t>(row.number));
      const bool same = random.below(std::uint64_t{2}) == 1;
      pairs.push_back({row.example, train_.partner(row.example, same, random), same ? 1 : 0});
    }
    return gather(train_, pairs);
  }

  Batch validation_batch(std::int64_t first, std::int64_t rows) const override {
    std::vector<PassagePair> pairs;
    for (const std::int64_t row : validation_examples(first, rows, validation_rows())) {
      Random random(kHeldOutSeed, Stream("wiki-pairs validation"), static_cast<std::uint64_t>(row));
      const bool same = row % 2 == 1;
      pairs.push_back({row / 2, validation_.partner(row / 2, same, random), same ? 1 : 0});
    }
    return gather(validation_, pairs);
  }

 private:
  Batch gather(const Passages& from, const std::vector<PassagePair>& pairs) const {
    Batch batch;
    batch.rows = static_cast<std::int64_t>(pairs.size());
    batch.text.tokens = batch.second.tokens = task_.max_tokens;
    for (const PassagePair& pair : pairs) {
      append(from[pair.first], batch.text.ids);
      append(from[pair.second], batch.second.ids);
      batch.labels.push_back(pair.label);
    }
    return batch;
  }

  void append(std::string_view passage, std::vector<std::int32_t>& ids) const {
    const std::vector<std::int32_t> encoded = tokenizer_->encode(passage);
    ids.insert(ids.end(), encoded.begin(), encoded.end());
  }

  Task task_;
  Passages train_;
  Passages validation_;
  std::uint64_t seed_;
  ExampleOrder order_;
  std::shared_ptr<const Tokenizer> tokenizer_;
};

}  // namespace

std::unique_ptr<Source> make_wiki_pairs_source(const Settings& data, const std::string& folder) {
  const std::int64_t bytes = data.integer("tokens", 4000, 16, std::int64_t{1} << 20);
  const double share = data.number("held_out", 0.05, 0.001, 0.5);
  std::vector<std::string> patterns = data.texts("files");
  if (patterns.empty()) patterns = {"enwiki2015.train.*"};
  Passages train(bytes), validation(bytes);
  std::uint64_t article = 0;
  for (const std::string& pattern : patterns) {
    for (const std::string& path : matching_files(folder, pattern)) {
      read_documents(path, [&](Document&& document) {
        std::string text;
        for (const std::string& line : document.lines) text += line + "\n";
        Random random(kHeldOutSeed, Stream("wiki-pairs held out"), article++);
        (random.chance(share) ? validation : train).add_article(text);
      });
    }
  }
  for (const auto& [part, passages] :
       {std::pair("training", &train), std::pair("validation", &validation)}) {
    if (passages->articles() >= 2) continue;
    throw lln::Error(
        lln::ErrorCode::invalid_argument,
        fmt::format("wiki-pairs: expected at least 2 articles of {} bytes for {}, "
                    "found {} among {} articles of {}",
                    2 * bytes, part, passages->articles(), article, fmt::join(patterns, ", ")));
  }
  return std::make_unique<WikiPairSource>(std::move(train), std::move(validation), bytes,
                                          data_seed(data));
}

}  // namespace lln_torch
