// Attention without a feature map, as TransNormer has it: o = q (k^T v) / (N sqrt D), no row sums,
// and an RMS norm of the output over all heads in their place. The ablation of the feature map.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <cmath>

#include "lln_torch/zoo/attention.h"
#include "lln_torch/zoo/linear_form.h"
#include "lln_torch/zoo/precision.h"

namespace lln_torch {
namespace {

// Far below the mean square of an output: that of Gaussian tokens is about 1 / (27 N) at first.
constexpr double kLinearNormFloor = 1e-10;

class LinearAttention : public ProjectedAttention {
 public:
  LinearAttention(const AttentionConfig& config, const Settings& options)
      : ProjectedAttention(config, options),
        gain_(register_parameter("norm_weight", at::ones({config.heads, channels()}))) {}

 protected:
  Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask,
                Context&) override {
    const WithoutAutocast plain;
    const Tensor fq = at_least_f32(q) / std::sqrt(static_cast<double>(q.size(-1)));
    const Tensor fk = zero_padding(at_least_f32(k), key_mask);
    const Tensor values = at_least_f32(v);
    const Tensor sums = config().causal ? causal_linear_sums(fq, fk, values).values
                                        : at::matmul(fq, at::matmul(fk.transpose(-1, -2), values));
    const Tensor o = sums / keys_seen(q, key_mask);
    const Tensor mean_square = o.square().mean(at::IntArrayRef{1, 3}, /*keepdim=*/true);
    const Tensor normed = o * (mean_square + kLinearNormFloor).rsqrt() * gain_.unsqueeze(1);
    return normed.to(v.scalar_type());
  }
  void describe(Observation& observation) const override { observation.kind = "linear"; }

 private:
  // How many keys a row sees, at least 1; broadcasts over [batch, heads, tokens, channels].
  Tensor keys_seen(const Tensor& q, const Tensor& key_mask) const {
    const auto type = at_least_f32(q.detach()).scalar_type();
    Tensor counts =
        key_mask.defined() ? key_mask.to(type) : at::ones({1, q.size(2)}, q.options().dtype(type));
    counts = config().causal ? counts.cumsum(1) : counts.sum(1, /*keepdim=*/true);
    return counts.clamp_min(1).unsqueeze(1).unsqueeze(-1);
  }

  Tensor gain_;  // [heads, channels]
};

std::shared_ptr<Attention> make_linear(const AttentionConfig& config, const Settings& options) {
  return std::make_shared<LinearAttention>(config, options);
}

}  // namespace

ZooEntry linear_entry() {
  return {.name = "linear",
          .summary = "rms_norm(q (k^T v) / (N sqrt D)), no row sums; weights are signed",
          .cost = "time N D^2, memory N D",
          .parameters = "the gain of the norm, dim",
          .padding = "keys of padding weigh nothing and are not counted in N",
          .causal = true,
          .takes_diag = true,
          .make = make_linear};
}

}  // namespace lln_torch
