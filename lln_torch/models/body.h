// Bodies of models: from token ids, or from pixels, to one vector per token. The layers are those
// of BERT (post-norm) or of GPT and ViT (pre-norm); the attention inside them is one of the zoo.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <torch/nn/module.h>
#include <torch/nn/modules/embedding.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/modules/normalization.h>

#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "lln_torch/zoo/attention.h"

namespace lln_torch {

struct BodyConfig {
  std::int64_t layers = 6;
  std::int64_t dim = 384;
  std::int64_t heads = 6;
  std::int64_t feedforward = 0;  // channels inside the feed-forward part
  bool norm_first = true;        // pre-norm
  bool embedding_norm = false;   // a norm over the sum of the embeddings, as BERT has it
  double norm_epsilon = 1e-5;
  std::string positions = "learned";  // or "rotary", "none"
  std::string activation = "gelu";    // "gelu_tanh", "relu"
  double dropout = 0;
  double init_std = 0.02;
  bool causal = false;
  std::uint64_t seed = 0;  // of what is random in attentions
  std::int64_t max_tokens = 0;
  std::int64_t vocabulary = 0;                                  // of ids
  std::int64_t segments = 0;                                    // kinds of segments, 0: none
  std::int64_t channels = 0, height = 0, width = 0, patch = 0;  // of pixels
  bool cls_token = false;  // one learned token before the patches
};

// Zeros with probability p while training.
Tensor drop(const Tensor& x, double p, bool training);

// Linear maps and embeddings: normal weights, zero biases.
void init_linear(torch::nn::LinearImpl& linear, double std);

// What a layer remembers of the tokens before, in generation: it stands in for the attention.
class LayerMemory {
 public:
  virtual ~LayerMemory() = default;
  // x [rows, tokens, dim] of the tokens that follow those seen -> the same shape.
  virtual Tensor attend(const Tensor& x, Context& context) = 0;
  virtual std::int64_t bytes() const = 0;
};
// One for each layer, or none: rows are seen whole.
using LayerMemories = std::vector<std::unique_ptr<LayerMemory>>;

class Layer : public torch::nn::Module {
 public:
  Layer(const BodyConfig& config, std::int64_t number, const Settings& attention);
  // x [rows, tokens, dim]; key_mask bool [rows, tokens] or undefined.
  Tensor forward(const Tensor& x, const Tensor& key_mask, Context& context,
                 LayerMemory* memory = nullptr);
  Attention& attention() { return *attention_; }

 private:
  Tensor feedforward(const Tensor& x);

  BodyConfig config_;
  std::shared_ptr<Attention> attention_;
  torch::nn::LayerNorm attention_norm_{nullptr}, feedforward_norm_{nullptr};
  torch::nn::Linear expand_{nullptr}, contract_{nullptr};
};

// The layers, one after the other, the norm after the last where norms come first, and the tables
// of rotary positions.
class Stack : public torch::nn::Module {
 public:
  Stack(const BodyConfig& config, const Settings& attention);
  // The tokens are those from `first` on of their rows: in generation, and of pieces.
  Tensor forward(Tensor x, const Tensor& key_mask, Context& context, std::int64_t first = 0,
                 const LayerMemories& memories = {});
  std::int64_t size() const { return static_cast<std::int64_t>(layers_.size()); }
  Layer& layer(std::int64_t number) { return *layers_.at(static_cast<std::size_t>(number)); }

 private:
  BodyConfig config_;
  std::vector<std::shared_ptr<Layer>> layers_;
  torch::nn::LayerNorm norm_{nullptr};
  std::pair<Tensor, Tensor> rotary_;  // cosines and sines of max_tokens places; never stored
};

// Token, position and segment embeddings, then the stack.
class TextBody : public torch::nn::Module {
 public:
  TextBody(const BodyConfig& config, const Settings& attention);
  // ids int64 [rows, tokens]; segments the same or undefined: all 0 -> [rows, tokens, dim].
  Tensor forward(const Tensor& ids, const Tensor& mask, const Tensor& segments, Context& context);
  // The tokens that follow `first` others, of which `memories` know.
  Tensor continue_rows(const Tensor& ids, std::int64_t first, const LayerMemories& memories,
                       Context& context);
  const BodyConfig& config() const { return config_; }
  const Tensor& token_weight() const { return tokens_->weight; }
  Stack& stack() { return *stack_; }

 private:
  Tensor embed(const Tensor& ids, const Tensor& segments, std::int64_t first);

  BodyConfig config_;
  torch::nn::Embedding tokens_{nullptr}, positions_{nullptr}, segments_{nullptr};
  torch::nn::LayerNorm embedding_norm_{nullptr};
  std::shared_ptr<Stack> stack_;
};

// Patches of pixels, each mapped linearly to a token, then the stack.
class ImageBody : public torch::nn::Module {
 public:
  ImageBody(const BodyConfig& config, const Settings& attention);
  // pixels [rows, channels, height, width] or flat rows of them -> [rows, patches, dim], or patches
  // + 1 with the CLS token first. Patches are counted row by row.
  Tensor forward(const Tensor& pixels, Context& context);
  const BodyConfig& config() const { return config_; }

 private:
  BodyConfig config_;
  torch::nn::Linear patch_{nullptr};
  Tensor cls_;        // [dim]
  Tensor positions_;  // [tokens, dim]
  std::shared_ptr<Stack> stack_;
};

}  // namespace lln_torch
