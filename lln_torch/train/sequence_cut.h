// Batches whose rows lie in pieces on the ranks of a group: each rank has some tokens of every row.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lln_torch/models/model.h"
#include "lln_torch/parallel/pieces.h"

namespace lln_torch {

class SequenceCut {
 public:
  // Throws lln::Error where the model has an attention that needs its sequences whole, or the task
  // rows that are no single text. The group outlives this object.
  SequenceCut(const RankGroup& group, const torch::nn::Module& model, const Task& task);

  struct Part {
    TensorBatch batch;  // this rank's tokens
    Pieces pieces;
    double predictions = 0;  // that count here: over all ranks of the group those of the whole
  };
  // Every rank calls it with the same batch, which has whole rows.
  Part cut(const Batch& whole, const torch::Device& device) const;

  const RankGroup& group() const { return group_; }
  bool by_token() const { return by_token_; }  // what is predicted are tokens, not rows

 private:
  const RankGroup& group_;
  std::int64_t unit_ = 1;  // tokens that pieces are a multiple of
  bool by_token_ = false;
};

// `tokens` in as many pieces as there are ranks, as equal as multiples of `unit` can be; the last
// one has what is left.
std::vector<std::int64_t> piece_lengths(std::int64_t tokens, int ranks, std::int64_t unit);

}  // namespace lln_torch
