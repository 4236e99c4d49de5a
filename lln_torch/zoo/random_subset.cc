// Random tokens by priorities.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/zoo/random_subset.h"

#include <ATen/ATen.h>

#include "lln_torch/zoo/random_plan.h"

namespace lln_torch {

RandomSubset::RandomSubset(const AttentionConfig& config, std::int64_t places,
                           std::int64_t redraw_steps)
    : config_(config), places_(places), redraw_steps_(redraw_steps) {
  priorities_ = register_buffer("priorities", draw(0));
}

Tensor RandomSubset::draw(std::int64_t number) const {
  return at::rand({places_}, plan_generator(config_, number), at::TensorOptions(at::kFloat));
}

void RandomSubset::begin_step(std::int64_t step) {
  const std::int64_t number = redraw_steps_ > 0 ? step / redraw_steps_ : 0;
  if (number == drawn_) return;
  const at::NoGradGuard no_graph;
  priorities_.copy_(draw(number));
  drawn_ = number;
}

RandomSubset::Choice RandomSubset::choose(const Tensor& priorities, const Tensor& mask,
                                          std::int64_t size) {
  Tensor each = priorities.unsqueeze(0);
  if (mask.defined()) each = each.expand(mask.sizes()).masked_fill(mask.logical_not(), -1);
  const auto [highest, places] = each.topk(size, 1);
  return {places, highest.ge(0)};
}

}  // namespace lln_torch
