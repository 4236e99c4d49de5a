// Transformer-LS: one softmax over a window and over slots, weighted sums of all tokens whose
// weights the keys make themselves. Window and slots have a norm each (DualLN), since sums over
// many tokens are smaller than tokens. Causal: slots of every segment that has passed.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <torch/nn/modules/normalization.h>

#include <cmath>
#include <limits>

#include "lln_torch/zoo/attention.h"
#include "lln_torch/zoo/precision.h"
#include "lln_torch/zoo/tokens.h"

namespace lln_torch {
namespace {

constexpr double kLongShortHidden = std::numeric_limits<float>::lowest();

class LongShortAttention : public ProjectedAttention {
 public:
  LongShortAttention(const AttentionConfig& config, const Settings& options)
      : ProjectedAttention(config, options),
        window_(options.integer("window", 8, 1, 1 << 20)),
        // One slot for 16 tokens is what the paper's language models have.
        rank_(options.integer("rank", config.causal ? 1 : 32, 1, 1 << 20)) {
    if (config.causal) segment_ = options.integer("segment", 16 * rank_, 1, 1 << 24);
    const double bound = 1 / std::sqrt(static_cast<double>(channels()));
    slot_weight_ = register_parameter(
        "slot_weight", at::empty({config.heads, channels(), rank_}).uniform_(-bound, bound));
    const auto norm = [&](const char* name) {
      return register_module(name, torch::nn::LayerNorm(torch::nn::LayerNormOptions({channels()})));
    };
    window_norm_ = norm("window_norm");
    slot_norm_ = norm("slot_norm");
  }

 protected:
  Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask,
                Context&) override {
    const Alignment alignment(key_mask);
    const Tensor rows = alignment.to_front(q) / std::sqrt(static_cast<double>(q.size(3)));
    const Tensor keys = alignment.to_front(k);
    const Tensor values = alignment.to_front(zero_padding(v, key_mask));
    const Slots slots = make_slots(keys, values, alignment.key_mask());
    const Tensor row_blocks = in_blocks(rows, 2, window_);
    const Tensor near_keys = near(window_norm_->forward(keys), 2);
    const Tensor near_values = near(window_norm_->forward(values), 2);

    Tensor near_scores = at_least_f32(at::matmul(row_blocks, near_keys.transpose(-1, -2)));
    near_scores = near_scores.masked_fill(hidden_window(q, alignment.key_mask()), kLongShortHidden);
    Tensor far_scores = at_least_f32(at::matmul(rows, slots.keys.transpose(-1, -2)));
    if (slots.hidden.defined()) {
      far_scores = far_scores.masked_fill(slots.hidden, kLongShortHidden);
    }
    const Tensor weights =
        at::softmax(at::cat({near_scores, in_blocks(far_scores, 2, window_)}, -1), -1)
            .to(v.scalar_type());
    const auto parts = weights.split_with_sizes({near_scores.size(-1), far_scores.size(-1)}, -1);
    const Tensor o = at::matmul(parts[0], near_values).flatten(2, 3) +
                     at::matmul(parts[1].flatten(2, 3), slots.values);
    return alignment.back(o.narrow(2, 0, q.size(2)));
  }

 private:
  struct Slots {
    Tensor keys, values;  // [batch, heads, slots, channels]
    Tensor hidden;        // bool, broadcast over [batch, heads, tokens, slots]; may be undefined
  };

  // Each block with half a block on both sides, or with the block before it: [.., blocks, keys, ..]
  // in place of the tokens on axis dim.
  Tensor near(const Tensor& x, std::int64_t dim) const {
    const Tensor blocks = in_blocks(x, dim, window_);
    if (config().causal) return with_neighbours(blocks, dim, 1, 0);
    const std::int64_t half = window_ / 2;
    return with_neighbours(blocks, dim, 1, 1).narrow(dim + 1, window_ - half, window_ + 2 * half);
  }

  // bool [batch or 1, 1, blocks, rows or 1, keys]
  Tensor hidden_window(const Tensor& q, const Tensor& key_mask) const {
    const auto options = q.options().dtype(at::kLong);
    const Tensor real =
        key_mask.defined() ? key_mask : at::ones({1, q.size(2)}, options.dtype(at::kBool));
    const Tensor hidden = near(real, 1).logical_not().unsqueeze(1).unsqueeze(3);
    if (!config().causal) return hidden;
    const Tensor row = at::arange(window_, options).unsqueeze(-1);
    return hidden.logical_or(at::arange(-window_, window_, options).gt(row));
  }

  Slots make_slots(const Tensor& keys, const Tensor& values, const Tensor& key_mask) {
    Tensor scores = at_least_f32(at::matmul(keys, slot_weight_));  // [batch, heads, tokens, rank]
    if (key_mask.defined()) {
      scores =
          scores.masked_fill(key_mask.logical_not().unsqueeze(1).unsqueeze(-1), kLongShortHidden);
    }
    // P^T x of every segment, P softmax over the tokens of it.
    const auto sums = [&](const Tensor& p, const Tensor& x) {
      return slot_norm_->forward(at::matmul(p.transpose(-1, -2), x));
    };
    if (!config().causal) {
      const Tensor p = at::softmax(scores, 2).to(values.scalar_type());
      return {sums(p, keys), sums(p, values), {}};
    }
    const std::int64_t tokens = keys.size(2), segments = tokens / segment_;
    // The last segment is never over before the end of the sequence, unless it is full.
    const auto cut = [&](const Tensor& x, std::int64_t dim) {
      return x.narrow(dim, 0, segments * segment_).unflatten(dim, {segments, segment_});
    };
    const Tensor p = at::softmax(cut(scores, 2), 3).to(values.scalar_type());
    const auto options = keys.options().dtype(at::kLong);
    const Tensor row = at::arange(tokens, options).unsqueeze(-1);
    const Tensor last = (at::arange(segments, options) + 1) * segment_ - 1;
    Tensor hidden = last.gt(row).unsqueeze(0).unsqueeze(0);  // [1, 1, tokens, segments]
    if (key_mask.defined()) {
      const Tensor empty = cut(key_mask, 1).any(2).logical_not();
      hidden = hidden.logical_or(empty.unsqueeze(1).unsqueeze(1));
    }
    return {sums(p, cut(keys, 2)).flatten(2, 3), sums(p, cut(values, 2)).flatten(2, 3),
            hidden.repeat_interleave(rank_, 3)};
  }

  std::int64_t window_, rank_, segment_ = 0;
  Tensor slot_weight_;  // [heads, channels, rank]
  torch::nn::LayerNorm window_norm_{nullptr}, slot_norm_{nullptr};
};

std::shared_ptr<Attention> make_transformer_ls(const AttentionConfig& config,
                                               const Settings& options) {
  return std::make_shared<LongShortAttention>(config, options);
}

}  // namespace

ZooEntry transformer_ls_entry() {
  return {.name = "transformer-ls",
          .summary = "one softmax over a window (8) and rank (32) slots softmax(k W)^T [k, v]",
          .cost =
              "time N (2 w + r) D, memory N (2 w + r + D); causal: r N / segment in place of r "
              "(1 slot for 16 tokens)",
          .parameters = "r dim; two norms of D",
          .padding = "masked keys, no part of slots; places from the first token that counts",
          .causal = true,
          .takes_diag = true,
          .make = make_transformer_ls};
}

}  // namespace lln_torch
