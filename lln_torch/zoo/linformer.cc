// Linformer: keys and values are mixed along the tokens into a fixed number of rows, and queries
// attend to those. The mixing matrices have a column for each place, so the length is bounded.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <cmath>

#include "lln_torch/zoo/attention.h"
#include "lln_torch/zoo/tokens.h"

namespace lln_torch {
namespace {

class LinformerAttention : public ProjectedAttention {
 public:
  LinformerAttention(const AttentionConfig& config, const Settings& options)
      : ProjectedAttention(config, options) {
    const std::int64_t rank = options.integer("rank", 256, 1, 1 << 20);
    // Mixed keys start with the scale of keys.
    const double scale = 1 / std::sqrt(static_cast<double>(config.max_tokens));
    mix_keys_ = register_parameter("mix_keys", at::randn({rank, config.max_tokens}) * scale);
    if (!options.flag("share_kv", false)) {
      mix_values_ = register_parameter("mix_values", at::randn({rank, config.max_tokens}) * scale);
    }
  }

 protected:
  Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask,
                Context&) override {
    const std::int64_t tokens = q.size(2);
    check_tokens(config(), tokens);
    const Alignment alignment(key_mask);
    // Padding would be mixed into every row: it is zero before, not masked after.
    const auto mixed = [&](const Tensor& x, const Tensor& mix) {
      return at::matmul(mix.narrow(1, 0, tokens), alignment.to_front(zero_padding(x, key_mask)));
    };
    const Tensor keys = mixed(k, mix_keys_);
    const Tensor values = mixed(v, mix_values_.defined() ? mix_values_ : mix_keys_);
    return at::scaled_dot_product_attention(q, keys, values);
  }

 private:
  Tensor mix_keys_, mix_values_;  // [rank, max_tokens], the same for all heads
};

std::shared_ptr<Attention> make_linformer(const AttentionConfig& config, const Settings& options) {
  return std::make_shared<LinformerAttention>(config, options);
}

}  // namespace

ZooEntry linformer_entry() {
  return {.name = "linformer",
          .summary = "softmax(q (E k)^T / sqrt D) F v; E, F [rank, tokens] learned; rank 256",
          .cost = "time N rank D, memory N D",
          .parameters = "2 rank max_tokens; share_kv = true: half",
          .padding = "zero before E and F; places are counted from the first token that counts",
          .causal = false,
          .takes_diag = true,
          .make = make_linformer};
}

}  // namespace lln_torch
