// Nystroemformer: softmax attention through landmarks, the means of segments of the tokens that
// count, with the pseudo-inverse of the small matrix by iteration, and a depthwise convolution of
// the values.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "lln_torch/zoo/attention.h"
#include "lln_torch/zoo/precision.h"
#include "lln_torch/zoo/tokens.h"

namespace lln_torch {
namespace {

// Z <- Z/4 (13 I - A Z (15 I - A Z (7 I - A Z))). The start is scaled by the norms of each matrix:
// one number for a whole batch would make a result depend on its neighbours.
Tensor iterative_pseudo_inverse(const Tensor& a, std::int64_t iterations) {
  const Tensor size = a.abs();
  const Tensor scale = size.sum(-1).amax(-1) * size.sum(-2).amax(-1);
  Tensor z = a.transpose(-1, -2) / scale.unsqueeze(-1).unsqueeze(-1);
  const Tensor one = at::eye(a.size(-1), a.options());
  for (std::int64_t i = 0; i < iterations; ++i) {
    const Tensor az = at::matmul(a, z);
    const Tensor inner = 15 * one - at::matmul(az, 7 * one - az);
    z = at::matmul(z / 4, 13 * one - at::matmul(az, inner));
  }
  return z;
}

class NystromformerAttention : public ProjectedAttention {
 public:
  NystromformerAttention(const AttentionConfig& config, const Settings& options)
      : ProjectedAttention(config, options),
        landmarks_(options.integer("landmarks", 64, 1, 1 << 20)),
        iterations_(options.integer("iterations", 6, 1, 1000)) {
    const std::int64_t kernel = options.integer("conv", 33, 0, 1 << 20);
    if (kernel == 0) return;
    if (kernel % 2 == 0) options.refuse("conv", "an odd number, or 0 for none");
    const double bound = 1 / std::sqrt(static_cast<double>(kernel));
    conv_ =
        register_parameter("conv", at::empty({config.heads, 1, kernel, 1}).uniform_(-bound, bound));
  }

 protected:
  Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask,
                Context&) override {
    const WithoutAutocast exact;
    const Tensor rows = at_least_f32(q);
    const Tensor keys = at_least_f32(k);
    const Tensor values = at_least_f32(zero_padding(v, key_mask));
    const Means means = segments(rows, key_mask);
    const Tensor q_means = mean_tokens(rows, means);
    const Tensor k_means = mean_tokens(keys, means);
    const Tensor inverse =
        iterative_pseudo_inverse(among_landmarks(q_means, k_means, means.counts), iterations_);
    const Tensor seen = full_attention(q_means, keys, values, key_mask);
    Tensor o = full_attention(rows, k_means, at::matmul(inverse, seen), means.counts);
    if (conv_.defined()) o = o + convolved(values);
    return o.to(v.scalar_type());
  }

 private:
  // Which tokens a landmark is the mean of.
  struct Means {
    std::int64_t landmarks;
    Tensor shares;  // [batch or 1, landmarks, tokens]; undefined: equal runs of all tokens
    Tensor counts;  // bool [batch, landmarks], False where tokens are too few; undefined: all count
  };

  // The token of rank r among n that count belongs to segment floor(r m / n), m = min(landmarks,
  // n).
  Means segments(const Tensor& like, const Tensor& key_mask) const {
    const std::int64_t tokens = like.size(2);
    const std::int64_t most = std::min(landmarks_, tokens);
    if (!key_mask.defined() && tokens % most == 0) return {most, {}, {}};
    const Tensor mask =
        key_mask.defined() ? key_mask : at::ones({1, tokens}, like.options().dtype(at::kBool));
    const Tensor counts = token_counts(mask, like, tokens).clamp_min(1);
    const Tensor used = counts.clamp_max(most);
    const Tensor rank = mask.cumsum(1) - 1;
    const Tensor segment = at::floor_divide(rank * used, counts);
    const Tensor number = at::arange(most, counts.options());
    const Tensor member =
        segment.unsqueeze(1).eq(number.unsqueeze(-1)).logical_and(mask.unsqueeze(1));
    const Tensor sizes = member.sum(-1, true).clamp_min(1);
    return {most, member.to(like.scalar_type()) / sizes,
            key_mask.defined() ? number.unsqueeze(0).lt(used) : Tensor()};
  }

  static Tensor mean_tokens(const Tensor& x, const Means& means) {
    if (!means.shares.defined()) {
      return x.unflatten(2, {means.landmarks, x.size(2) / means.landmarks}).mean(3);
    }
    return at::matmul(means.shares.unsqueeze(1), x);
  }

  // softmax(Q~ K~^T / sqrt D); landmarks that are none are rows and columns of the identity, which
  // neither the iteration nor its start lets into the rest.
  static Tensor among_landmarks(const Tensor& q, const Tensor& k, const Tensor& counts) {
    const Tensor scores =
        at::matmul(q, k.transpose(2, 3)) / std::sqrt(static_cast<double>(q.size(3)));
    if (!counts.defined()) return at::softmax(scores, -1);
    const Tensor none = counts.logical_not();
    const Tensor weights = at::softmax(
        scores.masked_fill(none.unsqueeze(1).unsqueeze(1), std::numeric_limits<float>::lowest()),
        -1);
    return at::where(none.unsqueeze(1).unsqueeze(-1), at::eye(q.size(2), q.options()), weights);
  }

  Tensor convolved(const Tensor& v) const {
    const std::int64_t heads = v.size(1);
    return at::conv2d(v, conv_.to(v.scalar_type()), {}, 1, {conv_.size(2) / 2, 0}, 1, heads);
  }

  std::int64_t landmarks_, iterations_;
  Tensor conv_;  // [heads, 1, kernel, 1]
};

std::shared_ptr<Attention> make_nystromformer(const AttentionConfig& config,
                                              const Settings& options) {
  return std::make_shared<NystromformerAttention>(config, options);
}

}  // namespace

ZooEntry nystromformer_entry() {
  return {.name = "nystromformer",
          .summary = "softmax(q K~^T) pinv(softmax(Q~ K~^T)) softmax(Q~ k^T) v + depthwise conv(v)",
          .cost = "time N m D + m^3, memory N D (padded: N m); f32",
          .parameters = "conv H; conv = 0: none",
          .padding = "in no mean, masked keys, zero in the convolution",
          .causal = false,
          .takes_diag = true,
          .make = make_nystromformer};
}

}  // namespace lln_torch
