// Attention whose weights are products of features, w_ij = fq_i . fk_j, in time linear in the
// tokens: the sums over keys first, in the causal form as sums over the chunks before a row's own
// plus the masked chunk itself.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <functional>

namespace lln_torch {

// What a row sums up, before it is normalised.
struct LinearSums {
  at::Tensor values;  // sum_j w_ij v_j, [batch, heads, tokens, channels of v]
  at::Tensor mass;    // sum_j w_ij, [batch, heads, tokens, 1]
};

// fq, fk [batch, heads, tokens, features], v [batch, heads, tokens, channels]. Rows of fk of tokens
// that do not count are 0.
LinearSums linear_sums(const at::Tensor& fq, const at::Tensor& fk, const at::Tensor& v);
LinearSums causal_linear_sums(const at::Tensor& fq, const at::Tensor& fk, const at::Tensor& v);

// The causal form where w_ij = (fq_i . fk_j) exp(log_key_j - log_row_i) with log_row_i >= log_key_j
// for every j <= i, [batch, heads, tokens]; log_row does not fall from row to row. No exponential
// is above 1, whatever the logarithms.
LinearSums causal_scaled_sums(const at::Tensor& fq, const at::Tensor& fk, const at::Tensor& v,
                              const at::Tensor& log_key, const at::Tensor& log_row);

// values / mass; 0 where there is no mass.
at::Tensor normalised(const LinearSums& sums);

}  // namespace lln_torch
