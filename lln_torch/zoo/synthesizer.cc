// Synthesizer: attention weights that no pair of tokens makes. Random: a learned matrix, the same
// for every input. Dense: each token says its row of scores by a small network.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <torch/nn/modules/linear.h>

#include <cmath>
#include <limits>

#include "lln_torch/zoo/attention.h"
#include "lln_torch/zoo/precision.h"
#include "lln_torch/zoo/tokens.h"

namespace lln_torch {
namespace {

class SynthesizerAttention : public Attention {
 public:
  SynthesizerAttention(const AttentionConfig& config, const Settings& options) : config_(config) {
    const auto linear = [&](const char* name) {
      return register_module(
          name,
          torch::nn::Linear(torch::nn::LinearOptions(config.dim, config.dim).bias(config.bias)));
    };
    value_ = linear("value");
    output_ = linear("output");
    const std::int64_t places = config.max_tokens;
    if (options.choice("kind", "random", {"random", "dense"}) == "random") {
      scores_ = register_parameter("scores", at::randn({config.heads, places, places}));
      return;
    }
    hidden_ = linear("hidden");
    const double bound = 1 / std::sqrt(static_cast<double>(channels()));
    score_weight_ = register_parameter(
        "score_weight", at::empty({config.heads, channels(), places}).uniform_(-bound, bound));
    score_bias_ = register_parameter("score_bias",
                                     at::empty({config.heads, 1, places}).uniform_(-bound, bound));
  }

  Tensor forward(const Tensor& x, const Tensor& key_mask, Context& context) override {
    if (x.size(1) == 0) return at::zeros_like(x);
    check_tokens(config_, x.size(1));
    if (context.observer != nullptr) {
      context.observer->observe(
          {.layer = config_.layer, .name = config_.name, .key_mask = key_mask});
    }
    const Alignment alignment(key_mask);
    const Tensor v = alignment.to_front(zero_padding(split(value_->forward(x)), key_mask));
    const Tensor weights = at::softmax(masked(scores(x, alignment), alignment.key_mask()), -1);
    const Tensor o = alignment.back(at::matmul(weights.to(v.scalar_type()), v).expand_as(v));
    return output_->forward(o.transpose(1, 2).flatten(2));
  }

 private:
  std::int64_t channels() const { return config_.dim / config_.heads; }

  Tensor split(const Tensor& all) const {
    return all.view({all.size(0), all.size(1), config_.heads, channels()}).transpose(1, 2);
  }

  // [batch or 1, heads, tokens, tokens]
  Tensor scores(const Tensor& x, const Alignment& alignment) {
    const std::int64_t tokens = x.size(1);
    if (scores_.defined()) return scores_.narrow(1, 0, tokens).narrow(2, 0, tokens).unsqueeze(0);
    const Tensor hidden = alignment.to_front(split(at::relu(hidden_->forward(x))));
    return at::matmul(hidden, score_weight_.narrow(2, 0, tokens)) +
           score_bias_.narrow(2, 0, tokens);
  }

  Tensor masked(const Tensor& scores, const Tensor& key_mask) const {
    const Tensor all = at_least_f32(scores);
    const double lowest = std::numeric_limits<float>::lowest();
    Tensor hidden;
    if (key_mask.defined()) hidden = key_mask.logical_not().unsqueeze(1).unsqueeze(1);
    if (config_.causal) {
      const auto options = all.options().dtype(at::kBool);
      const Tensor later = at::ones({all.size(2), all.size(3)}, options).triu(1);
      hidden = hidden.defined() ? hidden.logical_or(later) : later;
    }
    return hidden.defined() ? all.masked_fill(hidden, lowest) : all;
  }

  AttentionConfig config_;
  torch::nn::Linear value_{nullptr}, output_{nullptr}, hidden_{nullptr};
  Tensor scores_;                     // [heads, max_tokens, max_tokens] of "random"
  Tensor score_weight_, score_bias_;  // [heads, channels or 1, max_tokens] of "dense"
};

std::shared_ptr<Attention> make_synthesizer(const AttentionConfig& config,
                                            const Settings& options) {
  return std::make_shared<SynthesizerAttention>(config, options);
}

}  // namespace

ZooEntry synthesizer_entry() {
  return {.name = "synthesizer",
          .summary =
              "softmax(S) v; S learned (kind = random) or S = relu(x W1) W2 (dense); "
              "no q, k",
          .cost = "time N^2 D, memory N^2",
          .parameters = "no query, key; random: H max_tokens^2; dense: dim^2 + dim max_tokens",
          .padding = "masked keys; places are counted from the first token that counts",
          .causal = true,
          .takes_diag = false,
          .make = make_synthesizer};
}

}  // namespace lln_torch
