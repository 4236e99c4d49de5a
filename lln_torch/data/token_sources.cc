// The tasks "mlm" and "lm": random crops of a tokenised corpus for training, consecutive windows
// for validation. What is hidden in a row is a function of the seed, the step and the row.
// SPDX-License-Identifier: Apache-2.0
#include <fmt/format.h>

#include <filesystem>
#include <limits>

#include "lln/error.h"
#include "lln_torch/config/settings.h"
#include "lln_torch/data/preview.h"
#include "lln_torch/data/random.h"
#include "lln_torch/data/text_sources.h"
#include "lln_torch/data/token_corpus.h"

namespace lln_torch {
namespace {

// The masks of the validation are those of this seed in every run, so that runs can be compared.
constexpr std::uint64_t kValidationSeed = 0;

struct TokenWindow {
  std::int64_t first = 0;
  std::int64_t tokens = 0;
};

// What both tasks share: where rows are cut out of the corpus.
class TokenSource : public Source {
 public:
  TokenSource(const Settings& data, const std::string& folder, std::int64_t window_extra)
      : tokens_(data.integer("tokens", 512, 8, std::int64_t{1} << 24)),
        seed_(data_seed(data)),
        across_(data.flag("across_documents", true)),
        corpus_((std::filesystem::path(folder) / data.text("shards", "")).string()) {
    window_ = tokens_ + window_extra;
    const std::int64_t most_rows =
        data.integer("validation_rows", 0, 0, std::numeric_limits<std::int64_t>::max());
    for (const auto& [part, sequence] :
         {std::pair("training", &corpus_.train), std::pair("validation", &corpus_.validation)}) {
      if (sequence->tokens() >= 2) continue;
      throw lln::Error(lln::ErrorCode::invalid_argument,
                       fmt::format("the corpus has {} tokens for {}", sequence->tokens(), part));
    }
    if (across_ && corpus_.train.tokens() < window_) {
      throw lln::Error(lln::ErrorCode::invalid_argument,
                       fmt::format("expected at least {} tokens for training, a row; found {}",
                                   window_, corpus_.train.tokens()));
    }
    cut_validation(window_extra > 0 ? 1 : 0);
    if (most_rows > 0 && most_rows < static_cast<std::int64_t>(windows_.size())) {
      windows_.resize(static_cast<std::size_t>(most_rows));
    }
    task_.vocabulary = corpus_.tokenizer->vocabulary();
    task_.max_tokens = tokens_;
    task_.pad_id = corpus_.tokenizer->special().pad;
    task_.text_of_ids = text_by(corpus_.tokenizer);
    task_.metrics = {"loss"};
  }

  const Task& task() const override { return task_; }
  const Tokenizer* tokenizer() const override { return corpus_.tokenizer.get(); }
  std::int64_t validation_rows() const override {
    return static_cast<std::int64_t>(windows_.size());
  }
  double steps_per_epoch(std::int64_t batch_rows) const override {
    return static_cast<double>(corpus_.train.tokens()) /
           (static_cast<double>(batch_rows) * static_cast<double>(tokens_));
  }

  Batch train_batch(std::int64_t step, std::int64_t batch_rows, std::int64_t first,
                    std::int64_t rows) const override {
    Batch batch = empty_batch(rows);
    for (std::int64_t r = 0; r < rows; ++r) {
      const auto item = static_cast<std::uint64_t>(step * batch_rows + first + r);
      fill_row(batch, r, corpus_.train, crop(item), seed_, item);
    }
    return batch;
  }

  Batch validation_batch(std::int64_t first, std::int64_t rows) const override {
    Batch batch = empty_batch(rows);
    for (std::int64_t r = 0; r < rows; ++r) {
      fill_row(batch, r, corpus_.validation, windows_.at(static_cast<std::size_t>(first + r)),
               kValidationSeed, static_cast<std::uint64_t>(first + r));
    }
    return batch;
  }

 protected:
  // Row r of the batch out of this window of the corpus; `item` is the row's number for its seed.
  virtual void fill_row(Batch& batch, std::int64_t r, const TokenSequence& from,
                        const TokenWindow& window, std::uint64_t seed,
                        std::uint64_t item) const = 0;

  Batch empty_batch(std::int64_t rows) const {
    Batch batch;
    batch.rows = rows;
    batch.text.tokens = tokens_;
    batch.text.ids.assign(static_cast<std::size_t>(rows * tokens_),
                          corpus_.tokenizer->special().pad);
    batch.labels.assign(static_cast<std::size_t>(rows * tokens_), kIgnoredLabel);
    return batch;
  }

  // Marks what lies behind the first `tokens` of a row as padding.
  void pad_row(Batch& batch, std::int64_t r, std::int64_t tokens) const {
    if (tokens == tokens_) return;
    std::vector<std::uint8_t>& mask = batch.text.mask;
    if (mask.empty()) mask.assign(static_cast<std::size_t>(batch.rows * tokens_), 1);
    std::fill(mask.begin() + r * tokens_ + tokens, mask.begin() + (r + 1) * tokens_, 0);
  }

  Task task_;
  std::int64_t tokens_;
  std::int64_t window_ = 0;  // tokens of the corpus in a row
  std::uint64_t seed_;
  bool across_;
  TokenCorpus corpus_;

 private:
  TokenWindow crop(std::uint64_t item) const {
    Random random(seed_, Stream("crop"), item);
    if (across_) return {random.below(corpus_.train.tokens() - window_ + 1), window_};
    const auto [begin, end] = corpus_.train.document_around(random.below(corpus_.train.tokens()));
    const std::int64_t last = std::max(begin, end - window_);
    const std::int64_t first = random.between(begin, last);
    return {first, std::min(window_, end - first)};
  }

  // `overlap` tokens of a window are those that the next begins with.
  void cut_validation(std::int64_t overlap) {
    const TokenSequence& all = corpus_.validation;
    for (std::int64_t begin = 0; begin < all.tokens();) {
      const std::int64_t end = across_ ? all.tokens() : all.document_around(begin).second;
      for (std::int64_t first = begin; first + overlap < end; first += window_ - overlap) {
        const std::int64_t tokens = std::min(window_, end - first);
        // A last piece across documents is left out: all rows are full then.
        if (tokens == window_ || !across_ || windows_.empty()) windows_.push_back({first, tokens});
      }
      begin = end;
    }
  }

  std::vector<TokenWindow> windows_;  // rows of the validation
};

class MaskedTokenSource final : public TokenSource {
 public:
  MaskedTokenSource(const Settings& data, const std::string& folder, bool special)
      : TokenSource(data, folder, special ? -2 : 0),
        special_(special),
        share_(data.number("mask_share", 0.15, 0.01, 0.9)) {
    const SpecialTokens& ids = corpus_.tokenizer->special();
    task_.name = "mlm";
    task_.kind = TaskKind::masked_tokens;
    task_.predicted_share = share_;
    task_.chance = unigram_loss(corpus_.train.counts(corpus_.index.vocabulary),
                                corpus_.validation.counts(corpus_.index.vocabulary),
                                {ids.pad, ids.unknown, ids.start, ids.separator, ids.mask});
    task_.chance_text = "loss of predicting every token by its frequency (unigram)";
  }

 private:
  void fill_row(Batch& batch, std::int64_t r, const TokenSequence& from, const TokenWindow& window,
                std::uint64_t seed, std::uint64_t item) const override {
    const SpecialTokens& special = corpus_.tokenizer->special();
    const std::span<std::int32_t> row(batch.text.ids.data() + r * tokens_,
                                      static_cast<std::size_t>(tokens_));
    const auto size = static_cast<std::size_t>(window.tokens);
    const std::size_t shift = special_ ? 1 : 0;
    from.copy(window.first, row.subspan(shift, size));
    if (special_) {
      row[0] = special.start;
      row[size + 1] = special.separator;
    }
    pad_row(batch, r, window.tokens + (special_ ? 2 : 0));
    hide(row.subspan(shift, size), batch.labels.data() + r * tokens_ + shift, seed, item);
  }

  // 15% are predicted; of them 80% hidden, 10% replaced by any token, 10% left. At least one, so
  // that every row has a loss.
  void hide(std::span<std::int32_t> ids, std::int32_t* labels, std::uint64_t seed,
            std::uint64_t item) const {
    const SpecialTokens& special = corpus_.tokenizer->special();
    Random random(seed, Stream("mask"), item);
    std::vector<std::size_t> text;
    bool any = false;
    const auto predict = [&](std::size_t i) {
      labels[i] = ids[i];
      const double kind = random.uniform();
      if (kind < 0.8) {
        ids[i] = special.mask;
      } else if (kind < 0.9) {
        do {
          ids[i] = static_cast<std::int32_t>(random.below(task_.vocabulary));
        } while (special.contains(ids[i]));
      }
      any = true;
    };
    for (std::size_t i = 0; i < ids.size(); ++i) {
      if (special.contains(ids[i])) continue;
      text.push_back(i);
      if (random.chance(share_)) predict(i);
    }
    if (!any && !text.empty()) predict(text[random.below(std::uint64_t{text.size()})]);
  }

  bool special_;
  double share_;
};

class NextTokenSource final : public TokenSource {
 public:
  NextTokenSource(const Settings& data, const std::string& folder) : TokenSource(data, folder, 1) {
    task_.name = "lm";
    task_.kind = TaskKind::next_token;
    task_.chance = unigram_loss(corpus_.train.counts(corpus_.index.vocabulary),
                                corpus_.validation.counts(corpus_.index.vocabulary), {});
    task_.chance_text = "loss of predicting every token by its frequency (unigram)";
  }

 private:
  void fill_row(Batch& batch, std::int64_t r, const TokenSequence& from, const TokenWindow& window,
                std::uint64_t, std::uint64_t) const override {
    std::vector<std::int32_t> ids(static_cast<std::size_t>(window.tokens));
    from.copy(window.first, ids);
    std::copy(ids.begin(), ids.end() - 1, batch.text.ids.begin() + r * tokens_);
    std::copy(ids.begin() + 1, ids.end(), batch.labels.begin() + r * tokens_);
    pad_row(batch, r, window.tokens - 1);
  }
};

}  // namespace

std::unique_ptr<Source> make_mlm_source(const Settings& data, const std::string& folder) {
  return std::make_unique<MaskedTokenSource>(data, folder, data.flag("special_tokens", true));
}

std::unique_ptr<Source> make_lm_source(const Settings& data, const std::string& folder) {
  return std::make_unique<NextTokenSource>(data, folder);
}

}  // namespace lln_torch
