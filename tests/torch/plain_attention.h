// Attention by its definition, in plain LibTorch and f64: the whole matrix of weights, in log
// space, so that torch's own autograd gives the gradients to compare with.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/ATen.h>

#include <cmath>
#include <limits>
#include <string>

#include "lln_torch/ops/attention.h"

namespace lln_torch::plain {

// ln phi(x).
inline at::Tensor log_feature(const at::Tensor& x, const std::string& feature) {
  if (feature == "exp") return x;
  if (feature == "elu") return at::where(x <= 0, x, at::log1p(x.clamp_min(0)));
  if (feature == "relu") return at::log(x.clamp_min(0) + 1e-3);
  if (feature == "softplus") return at::log(at::softplus(x));
  return (std::stod(feature.substr(5)) * at::log(x.abs())).clamp_min(std::log(1e-12));
}

// Softmax over the visible keys; zeros where there are none.
inline at::Tensor visible_softmax(const at::Tensor& visible, const at::Tensor& scores) {
  const at::Tensor seen = scores.masked_fill(~visible, -std::numeric_limits<double>::infinity());
  const at::Tensor top =
      seen.amax(-1, true).clamp_min(std::numeric_limits<double>::lowest()).detach();
  const at::Tensor weights = at::exp(seen - top);
  return weights / weights.sum(-1, true).clamp_min(std::numeric_limits<double>::min());
}

// A scale, [], [heads] or [batch, heads], against [batch, heads, tokens, channels].
inline at::Tensor over_heads(const at::Tensor& x) {
  return x.dim() == 2 ? x.unsqueeze(-1).unsqueeze(-1) : x.reshape({1, -1, 1, 1});
}

// A weight, [], [heads], [heads, dim_v] or [batch, heads, tokens], against [.., dim_v].
inline at::Tensor over_weights(const at::Tensor& x) {
  if (x.dim() == 3) return x.unsqueeze(-1);
  return x.dim() == 2 ? x.unsqueeze(0).unsqueeze(2) : x.reshape({1, -1, 1, 1});
}

// Block of each token: counted from the first key that counts.
inline at::Tensor blocks(std::int64_t tokens, const at::Tensor& key_mask, std::int64_t size) {
  const at::Tensor first = at::where(key_mask.any(1), key_mask.to(at::kInt).argmax(1), 0);
  return (at::arange(tokens).unsqueeze(0) - first.unsqueeze(1)).div(size, "floor");
}

// One batch that is not packed; alpha and beta are given, and lengths as a mask.
inline at::Tensor attention(const at::Tensor& q, at::Tensor k, at::Tensor v,
                            const AttentionCall& call) {
  const std::int64_t group = q.size(1) / k.size(1);
  const at::Tensor a = log_feature(over_heads(call.alpha) * q, call.feature);
  const at::Tensor u =
      log_feature(over_heads(call.beta) * k, call.feature).repeat_interleave(group, 1);
  k = k.repeat_interleave(group, 1);
  v = v.repeat_interleave(group, 1);
  const std::int64_t batch = q.size(0), rows = q.size(2), columns = k.size(2);
  at::Tensor mask = call.key_mask;
  if (!mask.defined()) mask = at::ones({batch, columns}, at::kBool);
  at::Tensor visible = mask.unsqueeze(1).unsqueeze(1).expand({batch, 1, rows, columns});
  if (call.causal) visible = visible.logical_and(at::ones({rows, columns}, at::kBool).tril());
  const at::Tensor scores = at::logsumexp(a.unsqueeze(3) + u.unsqueeze(2), {-1});
  const at::Tensor lln = at::matmul(visible_softmax(visible, scores), v);
  if (call.diag_block == 0) return lln;
  const at::Tensor same = blocks(rows, mask, call.diag_block).unsqueeze(1).unsqueeze(3) ==
                          blocks(columns, mask, call.diag_block).unsqueeze(1).unsqueeze(2);
  const at::Tensor products =
      at::matmul(q, k.transpose(-1, -2)) / std::sqrt(static_cast<double>(q.size(3)));
  const at::Tensor diag = at::matmul(visible_softmax(visible.logical_and(same), products), v);
  if (call.lln_weight.defined()) {
    return over_weights(call.lln_weight) * lln + over_weights(call.diag_weight) * diag;
  }
  const at::Tensor mix = call.mix.defined() ? over_weights(call.mix)
                                            : at::full({1, 1, 1, 1}, call.fixed_mix, at::kDouble);
  return mix * lln + (1 - mix) * diag;
}

}  // namespace lln_torch::plain
