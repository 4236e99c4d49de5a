// Softmax attention by torch's own scaled_dot_product_attention, which chooses among cuDNN, flash
// and the memory-efficient kernels.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <cmath>
#include <optional>

#include "lln_torch/zoo/attention.h"
#include "lln_torch/zoo/tokens.h"

namespace lln_torch {
namespace {

// Keys: temperature (1), which the scores are divided by. Diag beside it stays as it is.
class SoftmaxAttention : public ProjectedAttention {
 public:
  SoftmaxAttention(const AttentionConfig& config, const Settings& options)
      : ProjectedAttention(config, options),
        temperature_(options.number("temperature", 1, 1e-3, 1e3)) {}

  std::optional<double> score_scale() const override {
    if (temperature_ == 1) return std::nullopt;
    return 1 / (temperature_ * std::sqrt(static_cast<double>(channels())));
  }

 protected:
  Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask,
                Context&) override {
    if (!key_mask.defined()) {
      return at::scaled_dot_product_attention(q, k, v, {}, 0.0, config().causal, score_scale());
    }
    Tensor mask = key_mask.unsqueeze(1).unsqueeze(1);  // [batch, 1, 1, tokens]
    if (config().causal) {
      // The two masks do not go together in the fused kernels.
      mask = mask.logical_and(at::ones({q.size(2), q.size(2)}, mask.options()).tril());
    }
    return at::scaled_dot_product_attention(q, k, v, with_full_empty_rows(mask), 0.0, false,
                                            score_scale());
  }
  // The instruments divide by sqrt D alone.
  void describe(Observation& observation) const override {
    if (temperature_ != 1) observation.q = observation.q / temperature_;
  }

 private:
  double temperature_;
};

std::shared_ptr<Attention> make_softmax(const AttentionConfig& config, const Settings& options) {
  return std::make_shared<SoftmaxAttention>(config, options);
}

}  // namespace

ZooEntry softmax_entry() {
  return {.name = "softmax",
          .summary = "softmax(q k^T / sqrt D) v, torch's fused kernels",
          .cost = "time N^2 D, memory N D (causal with a padding mask: N^2)",
          .parameters = "none",
          .padding = "masked keys",
          .causal = true,
          .takes_diag = true,
          .make = make_softmax};
}

ZooEntry softmax_diag_entry() {
  return {.name = "softmax+diag",
          .summary = "w softmax + (1 - w) diag; w = 0.5, learned or gated",
          .cost = "time N^2 D + N b D, memory N D",
          .parameters = "none; diag = learned: H D, scales: 2 H D, gate: H dim + H",
          .padding = "masked keys; blocks are counted from the first token that counts",
          .causal = true,
          .takes_diag = true,
          .make = make_softmax};
}

}  // namespace lln_torch
