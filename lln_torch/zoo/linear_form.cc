// Sums of linear attention. Values and mass come from one product: v with a column of ones.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/zoo/linear_form.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

namespace lln_torch {
namespace {

at::Tensor with_ones(const at::Tensor& v) {
  return at::cat({v, at::ones_like(v.narrow(-1, 0, 1))}, -1);
}

LinearSums split_sums(const at::Tensor& both) {
  const std::int64_t channels = both.size(-1) - 1;
  return {both.narrow(-1, 0, channels), both.narrow(-1, channels, 1)};
}

// The products inside chunks cost chunk numbers a row, those with the sums before a chunk as many
// as there are features: chunks of that size balance the two. Shorter ones cost more calls than
// they save work.
std::int64_t linear_chunk(std::int64_t features) {
  return std::clamp<std::int64_t>(features, 256, 512);
}

}  // namespace

LinearSums linear_sums(const at::Tensor& fq, const at::Tensor& fk, const at::Tensor& v) {
  return split_sums(at::matmul(fq, at::matmul(fk.transpose(-1, -2), with_ones(v))));
}

LinearSums causal_linear_sums(const at::Tensor& fq, const at::Tensor& fk, const at::Tensor& v) {
  const std::int64_t tokens = fq.size(2);
  const std::int64_t chunk = linear_chunk(fq.size(3));
  const at::Tensor values = with_ones(v);
  at::Tensor
      before;  // sum of fk_j v_j^T over the chunks before, [batch, heads, features, channels]
  std::vector<at::Tensor> rows;
  for (std::int64_t first = 0; first < tokens; first += chunk) {
    const std::int64_t length = std::min(chunk, tokens - first);
    const at::Tensor q = fq.narrow(2, first, length);
    const at::Tensor k_t = fk.narrow(2, first, length).transpose(-1, -2);
    const at::Tensor x = values.narrow(2, first, length);
    at::Tensor o = at::matmul(at::matmul(q, k_t).tril(), x);
    if (before.defined()) o = o + at::matmul(q, before);
    rows.push_back(o);
    if (first + length == tokens) break;
    const at::Tensor own = at::matmul(k_t, x);
    before = before.defined() ? before + own : own;
  }
  return split_sums(rows.empty() ? values : at::cat(rows, 2));
}

LinearSums causal_scaled_sums(const at::Tensor& fq, const at::Tensor& fk, const at::Tensor& v,
                              const at::Tensor& log_key, const at::Tensor& log_row) {
  const std::int64_t tokens = fq.size(2);
  const std::int64_t chunk = linear_chunk(fq.size(3));
  const at::Tensor values = with_ones(v);
  at::Tensor before;     // as above, times exp(-reference)
  at::Tensor reference;  // log_row of the last row before the chunk, [batch, heads, 1]
  std::vector<at::Tensor> rows;
  for (std::int64_t first = 0; first < tokens; first += chunk) {
    const std::int64_t length = std::min(chunk, tokens - first);
    const at::Tensor q = fq.narrow(2, first, length);
    const at::Tensor k = fk.narrow(2, first, length);
    const at::Tensor x = values.narrow(2, first, length);
    const at::Tensor key = log_key.narrow(2, first, length);
    const at::Tensor row = log_row.narrow(2, first, length);
    // Above the diagonal the exponent may be anything: it is cut off before the exponential.
    const at::Tensor scale = (key.unsqueeze(-2) - row.unsqueeze(-1)).clamp_max(0).exp();
    at::Tensor o = at::matmul((at::matmul(q, k.transpose(-1, -2)) * scale).tril(), x);
    if (before.defined()) {
      o = o + at::matmul(q * (reference - row).exp().unsqueeze(-1), before);
    }
    rows.push_back(o);
    if (first + length == tokens) break;
    const at::Tensor next = row.narrow(2, length - 1, 1);
    const at::Tensor own = at::matmul((k * (key - next).exp().unsqueeze(-1)).transpose(-1, -2), x);
    before = before.defined() ? before * (reference - next).exp().unsqueeze(-1) + own : own;
    reference = next;
  }
  return split_sums(rows.empty() ? values : at::cat(rows, 2));
}

at::Tensor normalised(const LinearSums& sums) {
  const at::Tensor empty = sums.mass.eq(0);
  return (sums.values / sums.mass.masked_fill(empty, 1)).masked_fill(empty, 0);
}

}  // namespace lln_torch
