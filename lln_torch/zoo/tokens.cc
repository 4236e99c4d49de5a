// Places, blocks and neighbours of tokens.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/zoo/tokens.h"

#include <ATen/ATen.h>
#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "lln/error.h"

namespace lln_torch {
namespace {

Tensor gather_tokens(const Tensor& x, const Tensor& places) {
  return x.gather(2, places.unsqueeze(1).unsqueeze(-1).expand_as(x));
}

}  // namespace

void check_tokens(const AttentionConfig& config, std::int64_t tokens) {
  if (tokens <= config.max_tokens) return;
  throw lln::Error(lln::ErrorCode::invalid_argument,
                   fmt::format("attention \"{}\" of layer {}: a sequence of {} tokens, but it was "
                               "made for at most {} (max_tokens)",
                               config.name, config.layer, tokens, config.max_tokens));
}

Alignment::Alignment(const Tensor& key_mask) {
  if (!key_mask.defined()) return;
  const std::int64_t tokens = key_mask.size(1);
  const Tensor first = key_mask.to(at::kInt).argmax(1, true);
  const Tensor place = at::arange(tokens, first.options());
  forth_ = (place + first).remainder(tokens);
  back_ = (place - first).remainder(tokens);
  key_mask_ = key_mask.gather(1, forth_);
}

Tensor Alignment::to_front(const Tensor& x) const {
  return forth_.defined() ? gather_tokens(x, forth_) : x;
}

Tensor Alignment::back(const Tensor& x) const {
  return back_.defined() ? gather_tokens(x, back_) : x;
}

Tensor token_counts(const Tensor& key_mask, const Tensor& like, std::int64_t tokens) {
  if (key_mask.defined()) return key_mask.sum(1, true);
  return at::full({1, 1}, tokens, like.options().dtype(at::kLong));
}

Tensor in_blocks(const Tensor& x, std::int64_t dim, std::int64_t block) {
  const std::int64_t blocks = (x.size(dim) + block - 1) / block;
  const std::int64_t missing = blocks * block - x.size(dim);
  if (missing == 0) return x.unflatten(dim, {blocks, block});
  std::vector<std::int64_t> pad(2 * (x.dim() - dim), 0);
  pad.back() = missing;
  return at::constant_pad_nd(x, pad, 0).unflatten(dim, {blocks, block});
}

Tensor with_neighbours(const Tensor& blocks, std::int64_t dim, std::int64_t before,
                       std::int64_t after) {
  if (before == 0 && after == 0) return blocks;
  std::vector<std::int64_t> pad(2 * (blocks.dim() - dim), 0);
  pad[pad.size() - 2] = before;
  pad[pad.size() - 1] = after;
  const Tensor padded = at::constant_pad_nd(blocks, pad, 0);
  std::vector<Tensor> neighbours;
  for (std::int64_t i = 0; i <= before + after; ++i) {
    neighbours.push_back(padded.narrow(dim, i, blocks.size(dim)));
  }
  return at::cat(neighbours, dim + 1);
}

Tensor with_full_empty_rows(const Tensor& mask) {
  return mask.logical_or(mask.any(-1, true).logical_not());
}

Tensor block_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& mask) {
  const auto flat = [](const Tensor& x) { return x.transpose(1, 2).flatten(0, 1); };
  const Tensor rows = flat(q), keys = flat(k), values = flat(v);
  const Tensor counts = flat(with_full_empty_rows(mask).expand({q.size(0), -1, -1, -1, -1}));
  // The fused kernels on a device put the first axis into one of the grid that ends at 65535.
  constexpr std::int64_t kMost = 65535;
  std::vector<Tensor> parts;
  for (std::int64_t begin = 0; begin < rows.size(0); begin += kMost) {
    const std::int64_t length = std::min(kMost, rows.size(0) - begin);
    const auto part = [&](const Tensor& x) { return x.narrow(0, begin, length); };
    parts.push_back(
        at::scaled_dot_product_attention(part(rows), part(keys), part(values), part(counts)));
  }
  const Tensor o = parts.size() == 1 ? parts.front() : at::cat(parts, 0);
  return o.unflatten(0, {q.size(0), q.size(2)}).transpose(1, 2);
}

Tensor full_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask) {
  if (!key_mask.defined()) return at::scaled_dot_product_attention(q, k, v);
  return at::scaled_dot_product_attention(q, k, v,
                                          with_full_empty_rows(key_mask).unsqueeze(1).unsqueeze(1));
}

}  // namespace lln_torch
