// Local attention: softmax over the keys at most `window` tokens away, by blocks of that many
// queries against their own block and its neighbours.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <algorithm>

#include "lln_torch/zoo/attention.h"
#include "lln_torch/zoo/tokens.h"

namespace lln_torch {
namespace {

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
    const std::int64_t after = config().causal ? 0 : 1;
    const auto joined = [&](const Tensor& x) {
      return with_neighbours(in_blocks(x, 2, block), 2, 1, after);
    };
    const Tensor counts = key_mask.defined()
                              ? key_mask.view({-1, 1, tokens, 1})
                              : at::ones({1, 1, tokens, 1}, q.options().dtype(at::kBool));
    const Tensor seen =
        near(q.options(), block, after).logical_and(joined(counts).transpose(-1, -2));
    const Tensor o = block_attention(in_blocks(q, 2, block), joined(k), joined(v), seen);
    return o.flatten(2, 3).narrow(2, 0, tokens);
  }

 private:
  // Which of the joined keys are near enough, bool [block, (2 + after) block].
  Tensor near(const at::TensorOptions& options, std::int64_t block, std::int64_t after) const {
    const Tensor place = at::arange(block, options.dtype(at::kLong)).unsqueeze(1);
    const Tensor other = at::arange((2 + after) * block, options.dtype(at::kLong)) - block;
    const Tensor distance = place - other;
    return config().causal ? distance.ge(0).logical_and(distance.le(window_))
                           : distance.abs().le(window_);
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
          .padding = "masked keys",
          .causal = true,
          .takes_diag = false,
          .make = make_local};
}

}  // namespace lln_torch
