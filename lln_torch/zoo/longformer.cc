// Longformer: a band of half-width w and a few global tokens at the front, in one softmax. Computed
// in blocks of w tokens that see their neighbours, so the cost is N w.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <algorithm>

#include "lln_torch/zoo/attention.h"
#include "lln_torch/zoo/tokens.h"

namespace lln_torch {
namespace {

class LongformerAttention : public ProjectedAttention {
 public:
  LongformerAttention(const AttentionConfig& config, const Settings& options)
      : ProjectedAttention(config, options),
        window_(options.integer("window", 256, 1, 1 << 30)),
        global_(options.integer("global_tokens", 1, 0, 1 << 20)) {}

 protected:
  Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask,
                Context&) override {
    const Alignment alignment(key_mask);
    const Tensor rows = alignment.to_front(q), keys = alignment.to_front(k);
    const Tensor values = alignment.to_front(zero_padding(v, key_mask));
    const Tensor& counts = alignment.key_mask();
    const std::int64_t tokens = q.size(2), global = std::min(global_, tokens);
    const std::int64_t block = std::min(window_, tokens);
    const std::int64_t before = tokens > block ? 1 : 0;
    const std::int64_t after = config().causal ? 0 : before;

    const Tensor row_blocks = in_blocks(rows, 2, block);
    const std::int64_t blocks = row_blocks.size(2);
    // A global token is a column of every block, and not one of the band.
    const auto seen = [&](const Tensor& x, std::int64_t dim) {
      const Tensor near = with_neighbours(in_blocks(x, dim, block), dim, before, after);
      std::vector<std::int64_t> shape = near.sizes().vec();
      shape[dim + 1] = global;
      return at::cat({near, x.narrow(dim, 0, global).unsqueeze(dim).expand(shape)}, dim + 1);
    };
    Tensor mask = pattern(blocks, block, before, after, tokens, global, q);
    mask = mask.unsqueeze(0).unsqueeze(0);  // [1, 1, blocks, block, keys]
    if (counts.defined()) {
      mask = mask.logical_and(seen(counts, 1).unsqueeze(1).unsqueeze(3));
    }
    Tensor o = block_attention(row_blocks, seen(keys, 2), seen(values, 2), mask);
    o = o.flatten(2, 3).narrow(2, 0, tokens);
    // A causal global token sees what comes before it, which are global tokens: done already.
    if (global > 0 && !config().causal) {
      const Tensor first = full_attention(rows.narrow(2, 0, global), keys, values, counts);
      o = at::cat({first.to(o.scalar_type()), o.narrow(2, global, tokens - global)}, 2);
    }
    return alignment.back(o);
  }

 private:
  // bool [blocks, block, keys]: band columns, then global ones.
  Tensor pattern(std::int64_t blocks, std::int64_t block, std::int64_t before, std::int64_t after,
                 std::int64_t tokens, std::int64_t global, const Tensor& like) const {
    const auto options = like.options().dtype(at::kLong);
    const Tensor start = at::arange(blocks, options).view({-1, 1, 1}) * block;
    const Tensor row = start + at::arange(block, options).view({1, -1, 1});
    const Tensor column =
        start + at::arange(-before * block, (1 + after) * block, options).view({1, 1, -1});
    const Tensor global_column = at::arange(global, options).view({1, 1, -1});
    Tensor band = column.ge(global)
                      .logical_and(column.lt(tokens))
                      .logical_and((row - column).abs().le(window_));
    Tensor everywhere = at::ones({blocks, block, global}, like.options().dtype(at::kBool));
    if (config().causal) {
      band = band.logical_and(column.le(row));
      everywhere = global_column.le(row);
    }
    return at::cat({band, everywhere}, -1);
  }

  std::int64_t window_, global_;
};

std::shared_ptr<Attention> make_longformer(const AttentionConfig& config, const Settings& options) {
  return std::make_shared<LongformerAttention>(config, options);
}

}  // namespace

ZooEntry longformer_entry() {
  return {.name = "longformer",
          .summary = "softmax over |i - j| <= window (256) and the first global_tokens (1)",
          .cost = "time N (w + g) D, memory N (w + D)",
          .parameters = "none: global tokens use the same projections",
          .padding = "masked keys; the first tokens that count are the global ones",
          .causal = true,
          .takes_diag = true,
          .make = make_longformer};
}

}  // namespace lln_torch
