// Luna: a fixed number of slots attends to the tokens (pack), and the tokens attend to what the
// slots found (unpack). The slots travel: each layer hands its own, with a residual and a norm, to
// the next.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <torch/nn/modules/normalization.h>

#include <cmath>

#include "lln/error.h"
#include "lln_torch/zoo/attention.h"
#include "lln_torch/zoo/tokens.h"

namespace lln_torch {
namespace {

// P' = attn(P, X, X); O = attn(X, P', P'). q, k and v of the base are those of the tokens: k and v
// of the packing, q of the unpacking.
class LunaAttention : public ProjectedAttention {
 public:
  LunaAttention(const AttentionConfig& config, const Settings& options)
      : ProjectedAttention(config, options),
        slot_count_(options.integer("slots", 256, 1, 1 << 20)) {
    const auto linear = [&](const char* name) {
      return register_module(
          name,
          torch::nn::Linear(torch::nn::LinearOptions(config.dim, config.dim).bias(config.bias)));
    };
    slot_query_ = linear("slot_query");
    slot_key_ = linear("slot_key");
    slot_value_ = linear("slot_value");
    slot_norm_ = register_module("slot_norm",
                                 torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.dim})));
    if (config.layer == 0) {
      const double scale = 1 / std::sqrt(static_cast<double>(config.dim));
      slots_ = register_parameter("slots", at::randn({slot_count_, config.dim}) * scale);
    }
  }

 protected:
  Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask,
                Context& context) override {
    const Tensor slots = incoming(q.size(0), context);  // [batch, slots, dim]
    const auto split = [&](const Tensor& all) {
      return all.view({all.size(0), all.size(1), config().heads, channels()}).transpose(1, 2);
    };
    const Tensor packed =
        full_attention(split(slot_query_->forward(slots)), k, zero_padding(v, key_mask), key_mask);
    const Tensor found = packed.transpose(1, 2).flatten(2);
    context.carried[kCarried] = slot_norm_->forward(slots + found);
    return at::scaled_dot_product_attention(q, split(slot_key_->forward(found)),
                                            split(slot_value_->forward(found)));
  }

 private:
  static constexpr const char* kCarried = "luna";

  // The first layer starts from its parameter whatever an earlier pass has left.
  Tensor incoming(std::int64_t batch, const Context& context) const {
    if (slots_.defined()) return slots_.unsqueeze(0).expand({batch, -1, -1});
    const auto carried = context.carried.find(kCarried);
    if (carried == context.carried.end()) {
      throw lln::Error(lln::ErrorCode::invalid_argument,
                       fmt::format("luna of layer {}: no slots came from the layer before it; "
                                   "luna's layers are numbered from 0 and run in order",
                                   config().layer));
    }
    const Tensor& slots = carried->second;
    if (slots.dim() != 3 || slots.size(0) != batch || slots.size(2) != config().dim) {
      throw lln::Error(
          lln::ErrorCode::invalid_argument,
          fmt::format("luna of layer {}: expected slots [{}, slots, {}] from the layer before it, "
                      "found [{}]",
                      config().layer, batch, config().dim, fmt::join(slots.sizes(), ", ")));
    }
    return slots;
  }

  std::int64_t slot_count_;
  torch::nn::Linear slot_query_{nullptr}, slot_key_{nullptr}, slot_value_{nullptr};
  torch::nn::LayerNorm slot_norm_{nullptr};
  Tensor slots_;  // [slots, dim] of layer 0
};

std::shared_ptr<Attention> make_luna(const AttentionConfig& config, const Settings& options) {
  return std::make_shared<LunaAttention>(config, options);
}

}  // namespace

ZooEntry luna_entry() {
  return {.name = "luna",
          .summary = "P' = attn(P, x, x), o = attn(x, P', P'); 256 slots P go from layer to layer",
          .cost = "time N slots D, memory N D",
          .parameters = "3 projections and a norm of the slots; layer 0: slots dim",
          .padding = "masked keys of the packing",
          .causal = false,
          .takes_diag = true,
          .make = make_luna};
}

}  // namespace lln_torch
