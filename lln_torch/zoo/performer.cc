// Performer's FAVOR+: exp(q.k / sqrt D) as an expectation over random features,
// phi(x) = exp(W x' - |x'|^2/2 - max) + 1e-4 with x' = x D^(-1/4). Rows of W are orthogonal in
// blocks of D and as long as Gaussian ones.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <cmath>

#include "lln_torch/zoo/attention.h"
#include "lln_torch/zoo/linear_form.h"
#include "lln_torch/zoo/precision.h"
#include "lln_torch/zoo/random_plan.h"

namespace lln_torch {
namespace {

constexpr double kPerformerFloor = 1e-4;
// Stands for minus infinity where a difference of two of them must not be NaN.
constexpr double kPerformerNoKey = -1e30;

// [features, channels]: the Q of Gaussian matrices, whose rows get the length of Gaussian vectors
// (chi with as many degrees of freedom as channels). Drawn on the CPU: every device sees the same.
Tensor draw_orthogonal(std::int64_t features, std::int64_t channels, at::Generator random) {
  const auto options = at::TensorOptions().dtype(at::kDouble);
  const std::int64_t blocks = (features + channels - 1) / channels;
  const auto [orthogonal, upper] =
      at::linalg_qr(at::randn({blocks, channels, channels}, random, options));
  // The signs make Q uniform over rotations; without them it depends on the algorithm.
  const Tensor q = orthogonal * upper.diagonal(0, -2, -1).sign().unsqueeze(-2);
  const Tensor rows = q.transpose(-1, -2).reshape({blocks * channels, channels});
  const Tensor lengths = at::randn({features, channels}, random, options).norm(2, {1}, true);
  return (rows.narrow(0, 0, features) * lengths).to(at::kFloat);
}

class PerformerAttention : public ProjectedAttention {
 public:
  PerformerAttention(const AttentionConfig& config, const Settings& options)
      : ProjectedAttention(config, options),
        features_(options.integer("features", 256, 1, 1 << 16)),
        redraw_steps_(options.integer("redraw_steps", 1000, 0, 1 << 30)),
        projection_(register_buffer("projection", draw(0))) {}

  void begin_step(std::int64_t step) override {
    const std::int64_t number = redraw_steps_ > 0 ? step / redraw_steps_ : 0;
    if (number == drawn_) return;
    const at::NoGradGuard no_graph;
    projection_.copy_(draw(number));
    drawn_ = number;
  }

 protected:
  Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask,
                Context& context) override {
    if (is_training()) begin_step(context.step);
    const WithoutAutocast plain;
    const Tensor log_q = log_features(q);
    const Tensor row_max = log_q.detach().amax(-1, /*keepdim=*/true);
    const Tensor fq = (log_q - row_max).exp() + kPerformerFloor;
    const Tensor values = zero_padding(at_least_f32(v), key_mask);
    Tensor log_k = log_features(k);
    if (key_mask.defined()) {
      const Tensor padding = key_mask.logical_not().unsqueeze(1).unsqueeze(-1);
      log_k = log_k.masked_fill(padding, kPerformerNoKey);
    }
    const Tensor key_max = log_k.detach().amax(-1);  // [batch, heads, tokens]
    const LinearSums sums = config().causal ? causal_sums(fq, log_k, key_max, values, key_mask)
                                            : all_sums(fq, log_k, key_max, values, key_mask);
    return normalised(sums).to(v.scalar_type());
  }
  void describe(Observation& observation) const override {
    observation.kind = "performer" + std::to_string(features_);
  }

 private:
  Tensor draw(std::int64_t number) const {
    return draw_orthogonal(features_, channels(), plan_generator(config(), number));
  }

  // W x' - |x'|^2/2, [batch, heads, tokens, features].
  Tensor log_features(const Tensor& x) const {
    const Tensor scaled = at_least_f32(x) / std::pow(static_cast<double>(channels()), 0.25);
    const Tensor random = projection_.to(scaled.scalar_type());
    return at::matmul(scaled, random.t()) - scaled.square().sum(-1, /*keepdim=*/true) / 2;
  }

  static LinearSums all_sums(const Tensor& fq, const Tensor& log_k, const Tensor& key_max,
                             const Tensor& values, const Tensor& key_mask) {
    const Tensor top = key_max.amax(-1, /*keepdim=*/true).unsqueeze(-1);
    const Tensor fk = zero_padding((log_k - top).exp() + kPerformerFloor, key_mask);
    return linear_sums(fq, fk, values);
  }

  // The maximum is over the keys that the row sees: that over all keys would let the future into
  // the past, through the share of the floor. The floor's part, equal for all keys, is added apart.
  static LinearSums causal_sums(const Tensor& fq, const Tensor& log_k, const Tensor& key_max,
                                const Tensor& values, const Tensor& key_mask) {
    const Tensor row_top = std::get<0>(key_max.cummax(-1));
    const Tensor fk = zero_padding((log_k - key_max.unsqueeze(-1)).exp(), key_mask);
    const LinearSums sums = causal_scaled_sums(fq, fk, values, key_max, row_top);
    const Tensor floor = kPerformerFloor * fq.sum(-1, /*keepdim=*/true);
    const Tensor ones = at::ones_like(values.narrow(-1, 0, 1));
    const Tensor counts = zero_padding(ones, key_mask).cumsum(2);
    return {sums.values + floor * values.cumsum(2), sums.mass + floor * counts};
  }

  std::int64_t features_, redraw_steps_;
  std::int64_t drawn_ = -1;  // which draw the buffer holds; unknown before the first training step
  Tensor projection_;        // [features, channels]
};

std::shared_ptr<Attention> make_performer(const AttentionConfig& config, const Settings& options) {
  return std::make_shared<PerformerAttention>(config, options);
}

}  // namespace

ZooEntry performer_entry() {
  return {.name = "performer",
          .summary = "FAVOR+: random positive features of exp(q.k / sqrt D), orthogonal",
          .cost = "time N m D, memory N m; m = features (256)",
          .parameters = "none; buffer projection, m D, redrawn every redraw_steps (1000)",
          .padding = "keys of padding weigh nothing and are not in the maximum",
          .causal = true,
          .takes_diag = true,
          .make = make_performer};
}

}  // namespace lln_torch
