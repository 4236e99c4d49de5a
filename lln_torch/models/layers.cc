// A layer (attention and feed-forward, with norms before or after them) and the stack of them.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <torch/nn/init.h>

#include "lln_torch/models/body.h"
#include "lln_torch/ops/handles.h"

namespace lln_torch {
namespace {

torch::nn::LayerNorm make_norm(const BodyConfig& config) {
  return torch::nn::LayerNorm(torch::nn::LayerNormOptions({config.dim}).eps(config.norm_epsilon));
}

// The projections of an attention have these names; other parameters are initialised by their
// owner.
void init_projections(Attention& attention, double std) {
  for (const auto& item : attention.named_children()) {
    const std::string& name = item.key();
    if (name != "query" && name != "key" && name != "value" && name != "output") continue;
    if (auto* linear = item.value()->as<torch::nn::LinearImpl>()) init_linear(*linear, std);
  }
}

// Cosines and sines [count, channels] of the places from `first` on; channel c turns with channel
// c + half.
std::pair<Tensor, Tensor> rotary_tables(std::int64_t first, std::int64_t count,
                                        std::int64_t channels, const at::Device& device) {
  const auto options = at::TensorOptions(at::kDouble).device(device);
  const Tensor rates =
      at::pow(10000.0, at::arange(0, channels, 2, options) / static_cast<double>(-channels));
  const Tensor angles = at::outer(at::arange(first, first + count, options), rates);
  const Tensor both = at::cat({angles, angles}, 1);
  return {both.cos().to(at::kFloat), both.sin().to(at::kFloat)};
}

}  // namespace

Tensor drop(const Tensor& x, double p, bool training) {
  return p > 0 && training ? at::dropout(x, p, true) : x;
}

void init_linear(torch::nn::LinearImpl& linear, double std) {
  torch::nn::init::normal_(linear.weight, 0, std);
  if (linear.bias.defined()) torch::nn::init::zeros_(linear.bias);
}

Layer::Layer(const BodyConfig& config, std::int64_t number, const Settings& attention)
    : config_(config) {
  AttentionConfig attention_config;
  attention_config.name = attention.text("name", attention_config.name);
  attention_config.dim = config.dim;
  attention_config.heads = config.heads;
  attention_config.max_tokens = config.max_tokens;
  attention_config.causal = config.causal;
  attention_config.layer = number;
  attention_config.seed = config.seed;
  attention_ = register_module("attention", make_attention(attention_config, attention));
  attention_norm_ = register_module("attention_norm", make_norm(config));
  expand_ = register_module("expand", torch::nn::Linear(config.dim, config.feedforward));
  contract_ = register_module("contract", torch::nn::Linear(config.feedforward, config.dim));
  feedforward_norm_ = register_module("feedforward_norm", make_norm(config));
  init_projections(*attention_, config.init_std);
  init_linear(*expand_, config.init_std);
  init_linear(*contract_, config.init_std);
}

Tensor Layer::feedforward(const Tensor& x) {
  const Tensor inner = expand_(x);
  if (config_.activation == "relu") return contract_(inner.relu());
  return contract_(at::gelu(inner, config_.activation == "gelu" ? "none" : "tanh"));
}

Tensor Layer::forward(const Tensor& x, const Tensor& key_mask, Context& context,
                      LayerMemory* memory) {
  // Linear maps that read one tensor would each convert it under autocast: once is enough.
  const auto attend = [&](const Tensor& input) {
    const Tensor same = in_autocast_type(input);
    const Tensor output = memory != nullptr ? memory->attend(same, context)
                                            : attention_->forward(same, key_mask, context);
    return drop(output, config_.dropout, is_training());
  };
  const auto feed = [&](const Tensor& input) {
    return drop(feedforward(in_autocast_type(input)), config_.dropout, is_training());
  };
  if (config_.norm_first) {
    const Tensor attended = x + attend(attention_norm_(x));
    return attended + feed(feedforward_norm_(attended));
  }
  const Tensor attended = attention_norm_(x + attend(x));
  return feedforward_norm_(attended + feed(attended));
}

Stack::Stack(const BodyConfig& config, const Settings& attention) : config_(config) {
  auto list = std::make_shared<torch::nn::Module>();
  for (std::int64_t number = 0; number < config.layers; ++number) {
    layers_.push_back(list->register_module(std::to_string(number),
                                            std::make_shared<Layer>(config, number, attention)));
  }
  register_module("layers", list);
  if (config.norm_first) norm_ = register_module("norm", make_norm(config));
  if (config.positions == "rotary") {
    rotary_ = rotary_tables(0, config.max_tokens, config.dim / config.heads, at::kCPU);
  }
}

Tensor Stack::forward(Tensor x, const Tensor& key_mask, Context& context, std::int64_t first,
                      const LayerMemories& memories) {
  if (config_.positions == "rotary") {
    auto& [cosines, sines] = rotary_;
    if (cosines.device() != x.device()) {
      cosines = cosines.to(x.device());
      sines = sines.to(x.device());
    }
    if (first + x.size(1) <= cosines.size(0)) {
      context.rotary_cos = cosines.narrow(0, first, x.size(1));
      context.rotary_sin = sines.narrow(0, first, x.size(1));
    } else {
      // Generation may go on for ever; no table does.
      std::tie(context.rotary_cos, context.rotary_sin) =
          rotary_tables(first, x.size(1), config_.dim / config_.heads, x.device());
    }
  }
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    x = layers_[i]->forward(x, key_mask, context, memories.empty() ? nullptr : memories[i].get());
  }
  return config_.norm_first ? norm_(x) : x;
}

}  // namespace lln_torch
