// Random tokens: every place has a random priority, and of the tokens that count those with the
// highest are taken. So padding changes no choice, no token is taken twice, and nothing is asked of
// the device. One draw serves redraw_steps steps of training; evaluation keeps the last.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/module.h>

#include <cstdint>

#include "lln_torch/zoo/attention.h"

namespace lln_torch {

class RandomSubset : public torch::nn::Module {
 public:
  // `places` numbers in [0, 1), the buffer "priorities", which is saved with the weights.
  RandomSubset(const AttentionConfig& config, std::int64_t places, std::int64_t redraw_steps);
  // Draws anew where training has come to the next `redraw_steps` steps; 0 never does.
  void begin_step(std::int64_t step);
  const Tensor& priorities() const { return priorities_; }

  struct Choice {
    Tensor places;  // int64 [batch, size], by falling priority
    Tensor counts;  // bool [batch, size]: False where there were not enough tokens
  };
  // priorities [tokens] of the places of one sequence; mask bool [batch, tokens] or undefined (then
  // batch is 1); size is at most the number of tokens.
  static Choice choose(const Tensor& priorities, const Tensor& mask, std::int64_t size);

 private:
  Tensor draw(std::int64_t number) const;

  AttentionConfig config_;
  std::int64_t places_, redraw_steps_;
  std::int64_t drawn_ = -1;  // which draw the buffer holds; unknown before the first training step
  Tensor priorities_;
};

}  // namespace lln_torch
