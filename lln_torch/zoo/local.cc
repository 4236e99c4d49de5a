// Local attention: softmax over the keys at most `window` tokens away, by blocks of that many
// queries against their own block and its neighbours.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <algorithm>
#include <vector>

#include "lln_torch/zoo/attention.h"

namespace lln_torch {
namespace {

// x [..., blocks, block, channels] -> [..., blocks, joined * block, channels]: each block with the
// one before it and, where three are joined, the one after it; beyond the ends there are zeros.
Tensor local_neighbours(const Tensor& x, std::int64_t joined) {
  const std::int64_t blocks = x.size(2);
  const Tensor padded = at::constant_pad_nd(x, {0, 0, 0, 0, 1, joined - 2});
  std::vector<Tensor> parts;
  for (std::int64_t i = 0; i < joined; ++i) parts.push_back(padded.narrow(2, i, blocks));
  return at::cat(parts, 3);
}

class LocalAttention : public ProjectedAttention {
 public:
  LocalAttention(const AttentionConfig& config, const Settings& options)
      : ProjectedAttention(config, options, {.takes_diag = false}),
        window_(options.integer("window", 64, 1, 1 << 20)) {}

 protected:
  Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask,
                Context&) override {
    const std::int64_t tokens = q.size(2);
    const std::int64_t block = std::min(window_, tokens);
    const std::int64_t blocks = (tokens + block - 1) / block;
    const std::int64_t joined = config().causal ? 2 : 3;
    const auto cut = [&](const Tensor& x) {
      return at::constant_pad_nd(x, {0, 0, 0, blocks * block - tokens})
          .view({x.size(0), x.size(1), blocks, block, x.size(3)});
    };
    const Tensor keys = local_neighbours(cut(k), joined);
    const Tensor values = local_neighbours(cut(v), joined);
    const Tensor seen = visible(key_mask, q, blocks, block, joined);
    const Tensor o = at::scaled_dot_product_attention(cut(q), keys, values, seen);
    return o.flatten(2, 3).narrow(2, 0, tokens);
  }

 private:
  // Which of the joined keys a query sees, bool [batch or 1, 1, blocks, block, joined * block].
  Tensor visible(const Tensor& key_mask, const Tensor& q, std::int64_t blocks, std::int64_t block,
                 std::int64_t joined) const {
    const std::int64_t tokens = q.size(2);
    const auto options = q.options();
    const Tensor place = at::arange(block, options.dtype(at::kLong)).unsqueeze(1);
    const Tensor other = at::arange(joined * block, options.dtype(at::kLong)) - block;
    const Tensor distance = place - other;
    const Tensor near = config().causal ? distance.ge(0).logical_and(distance.le(window_))
                                        : distance.abs().le(window_);  // [block, joined * block]
    const Tensor counts = key_mask.defined()
                              ? key_mask.view({-1, 1, tokens, 1})
                              : at::ones({1, 1, tokens, 1}, options.dtype(at::kBool));
    const Tensor cut = at::constant_pad_nd(counts, {0, 0, 0, blocks * block - tokens})
                           .view({counts.size(0), 1, blocks, block, 1});
    return near.logical_and(local_neighbours(cut, joined).transpose(-1, -2));
  }

  std::int64_t window_;
};

std::shared_ptr<Attention> make_local(const AttentionConfig& config, const Settings& options) {
  return std::make_shared<LocalAttention>(config, options);
}

}  // namespace

ZooEntry local_entry() {
  return {.name = "local",
          .summary = "softmax over the keys at most `window` tokens away (64)",
          .cost = "time N w D, memory N w",
          .parameters = "none",
          .padding = "masked keys; rows without a key are 0",
          .causal = true,
          .takes_diag = false,
          .make = make_local};
}

}  // namespace lln_torch
