// What attentions that know the places of tokens share: places counted from the first token that
// counts, blocks of tokens and their neighbours, and attention inside them at the cost of the
// blocks.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>

#include "lln_torch/zoo/attention.h"

namespace lln_torch {

// Throws lln::Error where a sequence is longer than config.max_tokens, the size of parameters.
void check_tokens(const AttentionConfig& config, std::int64_t tokens);

// Sequences moved to the front, so that padding on the left moves no place. Nothing is moved where
// there is no mask.
class Alignment {
 public:
  explicit Alignment(const Tensor& key_mask);
  Tensor to_front(const Tensor& x) const;  // [batch, heads, tokens, channels]
  Tensor back(const Tensor& x) const;
  const Tensor& key_mask() const { return key_mask_; }  // of the moved tokens, or undefined

 private:
  Tensor key_mask_;
  Tensor forth_, back_;  // [batch, tokens]
};

// How many tokens of each sequence count: int64 [batch, 1], or [1, 1] without a mask.
Tensor token_counts(const Tensor& key_mask, const Tensor& like, std::int64_t tokens);

// The axis `dim` of x cut into blocks, two axes in its place; the last block is filled with zeros.
Tensor in_blocks(const Tensor& x, std::int64_t dim, std::int64_t block);

// Each block (axis `dim`, its tokens on the next) behind `before` and ahead of `after` others;
// zeros where there are none.
Tensor with_neighbours(const Tensor& blocks, std::int64_t dim, std::int64_t before,
                       std::int64_t after);

// mask [..., rows, keys], in which rows without any key see all: whatever such a row gives must be
// finite, and torch's kernels do not agree on it.
Tensor with_full_empty_rows(const Tensor& mask);

// Softmax attention of every block's rows over that block's own keys, by torch's fused kernels.
// q [batch, heads, blocks, rows, channels]; k, v [batch, heads, blocks, keys, channels]; mask bool
// [batch or 1, heads or 1, blocks, rows or 1, keys], True where a key counts -> as q. Rows without
// any key are finite.
Tensor block_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask);

// Softmax attention of rows [batch, heads, rows, channels] over all keys that count.
Tensor full_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask);

}  // namespace lln_torch
