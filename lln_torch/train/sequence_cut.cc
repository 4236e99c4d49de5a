// Tokens of rows for one rank.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/sequence_cut.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>

#include "lln/error.h"
#include "lln_torch/train/train_step.h"

namespace lln_torch {
namespace {

// Labels of tokens `begin` to `begin` + `count` of all rows that are to be predicted.
double labels_between(const Batch& batch, std::int64_t begin, std::int64_t count) {
  double found = 0;
  for (auto row = batch.labels.begin(); row != batch.labels.end(); row += batch.text.tokens) {
    found +=
        static_cast<double>(count - std::count(row + begin, row + begin + count, kIgnoredLabel));
  }
  return found;
}

// The first token of each row that counts; the number of tokens where none does.
std::vector<std::int64_t> first_tokens(const TextRows& text, std::int64_t rows) {
  std::vector<std::int64_t> first;
  for (std::int64_t row = 0; row < rows; ++row) {
    const auto begin = text.mask.begin() + row * text.tokens;
    first.push_back(std::find(begin, begin + text.tokens, 1) - begin);
  }
  return first;
}

}  // namespace

std::vector<std::int64_t> piece_lengths(std::int64_t tokens, int ranks, std::int64_t unit) {
  const std::int64_t units = (tokens + unit - 1) / unit;
  std::vector<std::int64_t> lengths;
  for (std::int64_t rank = 0, begin = 0; rank < ranks; ++rank) {
    const std::int64_t end = std::min(units * (rank + 1) / ranks * unit, tokens);
    lengths.push_back(end - begin);
    begin = end;
  }
  return lengths;
}

SequenceCut::SequenceCut(const RankGroup& group, const torch::nn::Module& model, const Task& task)
    : group_(group),
      by_token_(task.kind == TaskKind::masked_tokens || task.kind == TaskKind::next_token) {
  if (task.vocabulary == 0 || task.kind == TaskKind::matched_pair ||
      task.kind == TaskKind::embedding) {
    throw lln::Error(lln::ErrorCode::unsupported,
                     fmt::format("task {}: only rows of one text each can lie in pieces on several "
                                 "ranks, found {}",
                                 task.name, task.vocabulary == 0 ? "images" : "pairs of texts"));
  }
  for (const auto& module : model.modules(/*include_self=*/false)) {
    const auto* const attention = dynamic_cast<const Attention*>(module.get());
    if (attention == nullptr) continue;
    const std::int64_t unit = attention->piece_unit();
    if (unit == 0) {
      throw lln::Error(
          lln::ErrorCode::unsupported,
          "the attention of this model needs its sequences whole: diag, the feature maps, "
          "and lln and lln+diag without centred_keys, wide, two_sided and chain can "
          "lie in pieces on several ranks");
    }
    unit_ = std::lcm(unit_, unit);
  }
}

SequenceCut::Part SequenceCut::cut(const Batch& whole, const torch::Device& device) const {
  const std::int64_t tokens = whole.text.tokens;
  const std::vector<std::int64_t> lengths = piece_lengths(tokens, group_.size(), unit_);
  const auto rank = static_cast<std::size_t>(group_.rank());
  const std::int64_t count = lengths[rank];
  const std::int64_t begin =
      std::accumulate(lengths.begin(), lengths.begin() + group_.rank(), std::int64_t{0});
  TensorBatch piece = to_tensors(whole, device);
  for (Tensor* x : {&piece.ids, &piece.mask, &piece.segments}) {
    if (x->defined()) *x = x->narrow(1, begin, count);
  }
  if (by_token_) piece.labels = piece.labels.narrow(1, begin, count);
  // Of rows every rank computes the same loss: it counts once.
  const double predictions = by_token_        ? labels_between(whole, begin, count)
                             : group_.first() ? predictions_in(whole)
                                              : 0;
  std::vector<std::int64_t> first_keys;
  if (!whole.text.mask.empty()) first_keys = first_tokens(whole.text, whole.rows);
  Pieces pieces(group_, lengths, {.key_mask = piece.mask}, std::move(first_keys));
  return {std::move(piece), std::move(pieces), predictions};
}

}  // namespace lln_torch
