// Text token by token from a causal model. What a layer keeps of the tokens before depends on its
// attention: LLN and the other feature maps of the core keep a DecodeState, whose size does not
// grow; softmax keeps keys and values; any other causal attention sees the whole row again at every
// token.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <random>

#include "lln_torch/models/heads.h"

namespace lln_torch {

class Generation {
 public:
  // `model` is a causal WordModel (a "decoder") in evaluation mode, which outlives this object.
  // Scales of LLN are those that it has now. Throws lln::Error where it predicts no next token.
  Generation(Model& model, std::int64_t rows);

  // ids int64 [rows, tokens], which follow all given before, on the device of the model -> scores
  // of the next token, f32 [rows, vocabulary]. No gradients.
  Tensor append(const Tensor& ids);

  std::int64_t tokens() const { return tokens_; }  // seen by each row
  // The most that it can see; 0: any number.
  std::int64_t most_tokens() const;
  // Of everything that is kept of them.
  std::int64_t bytes() const;
  // "state" (constant size), "keys and values", or "whole row": the most of any layer.
  const std::string& memory_kind() const { return memory_kind_; }

 private:
  WordModel& model_;
  std::int64_t rows_;
  std::int64_t tokens_ = 0;
  LayerMemories memories_;  // empty where rows are seen whole
  Tensor seen_;             // ids, where rows are seen whole
  std::string memory_kind_ = "state";
};

struct SamplingOptions {
  double temperature = 1;  // 0: the most likely token
  std::int64_t top_k = 0;  // only the k most likely; 0: all
};

// One token by `scores`, f32 [vocabulary]; equal scores and an equal generator give an equal token
// on every machine.
std::int64_t sample_token(const Tensor& scores, const SamplingOptions& options,
                          std::mt19937_64& random);

}  // namespace lln_torch
