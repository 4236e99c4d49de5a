// cosFormer: relu features, and a weight that falls with distance, cos(pi/2 (i - j)/M), which
// splits into cos cos + sin sin and so stays linear. M is the longest sequence: beyond it the
// cosine would be negative.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <fmt/format.h>

#include <numbers>

#include "lln/error.h"
#include "lln_torch/zoo/attention.h"
#include "lln_torch/zoo/linear_form.h"
#include "lln_torch/zoo/precision.h"

namespace lln_torch {
namespace {

class CosformerAttention : public ProjectedAttention {
 public:
  using ProjectedAttention::ProjectedAttention;

 protected:
  Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask,
                Context&) override {
    const std::int64_t tokens = q.size(2);
    if (tokens > config().max_tokens) {
      throw lln::Error(lln::ErrorCode::invalid_argument,
                       fmt::format("cosformer: {} tokens, but its weights are for max_tokens = {}",
                                   tokens, config().max_tokens));
    }
    const WithoutAutocast plain;
    const double step = std::numbers::pi / 2 / static_cast<double>(config().max_tokens);
    const Tensor angle = at::arange(tokens, q.options().dtype(at::kDouble)) * step;
    const auto features = [&](const Tensor& x) {
      const Tensor positive = at_least_f32(x).relu();
      const auto part = [&](const Tensor& wave) {
        return positive * wave.to(positive.scalar_type()).unsqueeze(-1);
      };
      return at::cat({part(angle.cos()), part(angle.sin())}, -1);
    };
    const Tensor fq = features(q), fk = zero_padding(features(k), key_mask);
    const Tensor values = at_least_f32(v);
    const LinearSums sums =
        config().causal ? causal_linear_sums(fq, fk, values) : linear_sums(fq, fk, values);
    return normalised(sums).to(v.scalar_type());
  }
};

std::shared_ptr<Attention> make_cosformer(const AttentionConfig& config, const Settings& options) {
  return std::make_shared<CosformerAttention>(config, options);
}

}  // namespace

ZooEntry cosformer_entry() {
  return {.name = "cosformer",
          .summary = "relu(q).relu(k) cos(pi/2 (i - j)/M), rows normalised, M = max_tokens",
          .cost = "time N D^2, memory N D",
          .parameters = "none",
          .padding = "keys of padding weigh nothing; rows without weight are 0",
          .causal = true,
          .takes_diag = true,
          .make = make_cosformer};
}

}  // namespace lln_torch
