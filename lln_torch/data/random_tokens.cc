// The task "random-tokens": ids drawn evenly, in which there is nothing to learn. For what training
// costs, at any length and vocabulary and without files.
// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "lln_torch/data/generated.h"
#include "lln_torch/data/text_sources.h"

namespace lln_torch {
namespace {

// Ids 0 and 1 are what a text has instead of words.
constexpr std::int32_t kPadding = 0, kMask = 1, kFirstWord = 2;

struct RandomTokens {
  std::int64_t vocabulary, tokens;
  bool next;          // the next token is predicted, otherwise some that are hidden
  double mask_share;  // of those that are hidden
};

void add_row(Random random, const RandomTokens& shape, Batch& batch) {
  std::vector<std::int32_t> words;
  for (std::int64_t i = 0; i <= shape.tokens; ++i) {
    words.push_back(kFirstWord +
                    static_cast<std::int32_t>(random.below(shape.vocabulary - kFirstWord)));
  }
  std::vector<std::int32_t> labels(words.begin() + 1, words.end());
  words.pop_back();
  if (!shape.next) {
    std::vector<std::size_t> hidden;
    for (std::size_t i = 0; i < words.size(); ++i) {
      if (random.chance(shape.mask_share)) hidden.push_back(i);
    }
    if (hidden.empty()) hidden.push_back(0);  // every row has a loss
    std::fill(labels.begin(), labels.end(), kIgnoredLabel);
    for (const std::size_t i : hidden) labels[i] = std::exchange(words[i], kMask);
  }
  batch.text.ids.insert(batch.text.ids.end(), words.begin(), words.end());
  batch.labels.insert(batch.labels.end(), labels.begin(), labels.end());
}

}  // namespace

std::unique_ptr<Source> make_random_tokens_source(const Settings& data, const std::string&) {
  RandomTokens shape{};
  shape.vocabulary = data.integer("vocabulary", 16000, 8, 1 << 24);
  shape.tokens = data.integer("tokens", 512, 8, std::int64_t{1} << 24);
  shape.next = data.choice("predict", "masked", {"masked", "next"}) == "next";
  if (!shape.next) shape.mask_share = data.number("mask_share", 0.15, 0.01, 0.9);
  const GeneratedSplits splits = GeneratedSplits::from_settings(data, 100'000, 64, 64);

  Task task;
  task.name = "random-tokens";
  task.kind = shape.next ? TaskKind::next_token : TaskKind::masked_tokens;
  task.vocabulary = shape.vocabulary;
  task.max_tokens = shape.tokens;
  task.pad_id = kPadding;
  if (!shape.next) task.predicted_share = shape.mask_share;
  task.metrics = {"loss"};
  task.chance = std::log(static_cast<double>(shape.vocabulary - kFirstWord));
  task.chance_text = "loss of an even guess; nothing better can be learned";

  const MakeExamples make = [=](Split split, const std::vector<std::int64_t>& indices) {
    Batch batch;
    batch.rows = static_cast<std::int64_t>(indices.size());
    batch.text.tokens = shape.tokens;
    for (const std::int64_t index : indices) {
      add_row(example_random(splits, Stream("random-tokens"), split, index), shape, batch);
    }
    return batch;
  };
  return make_generated_source(std::move(task), splits, make);
}

}  // namespace lln_torch
