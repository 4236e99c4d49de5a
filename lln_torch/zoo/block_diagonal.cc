// Block-diagonal softmax attention, the near part of every combination.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include "lln_torch/zoo/attention.h"

namespace lln_torch {

Tensor block_diagonal(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask,
                      std::int64_t block, bool causal) {
  const std::int64_t tokens = q.size(2);
  const auto options = q.options().dtype(at::kLong);
  const Tensor place = at::arange(tokens, options);
  const Tensor first =
      key_mask.defined() ? key_mask.to(at::kInt).argmax(1, true) : at::zeros({1, 1}, options);
  const Tensor number = at::floor_divide(place.unsqueeze(0) - first + tokens * block, block);
  Tensor mask = number.unsqueeze(1).eq(number.unsqueeze(2));  // [batch, tokens, tokens]
  if (key_mask.defined()) mask = mask.logical_and(key_mask.unsqueeze(1));
  if (causal) mask = mask.logical_and(place.unsqueeze(0).le(place.unsqueeze(1)));
  return at::scaled_dot_product_attention(q, k, zero_padding(v, key_mask), mask.unsqueeze(1));
}

}  // namespace lln_torch
