// Skyformer: a Gaussian kernel in place of softmax, not normalised by rows, through Nystroem's
// method on queries and keys stacked: one positive definite kernel, so the small system has an
// inverse.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>

#include "lln_torch/zoo/attention.h"
#include "lln_torch/zoo/precision.h"
#include "lln_torch/zoo/random_subset.h"
#include "lln_torch/zoo/tokens.h"

namespace lln_torch {
namespace {

// exp(-|a - b|^2 / (2 sqrt D)): a [.., rows, D], b [.., columns, D] -> [.., rows, columns].
Tensor gaussian_kernel(const Tensor& a, const Tensor& b) {
  const Tensor distance = a.square().sum(-1, true) + b.square().sum(-1).unsqueeze(-2) -
                          2 * at::matmul(a, b.transpose(-1, -2));
  // Rounding makes distances of equal points negative.
  return (distance.clamp_min(0) / (-2 * std::sqrt(static_cast<double>(a.size(-1))))).exp();
}

// C = G(Q, L) (G(L, L) + ridge I)^-1 G(L, K), L random rows of [Q; K].
class SkyformerAttention : public ProjectedAttention {
 public:
  SkyformerAttention(const AttentionConfig& config, const Settings& options)
      : ProjectedAttention(config, options),
        landmarks_(options.integer("landmarks", 128, 1, 1 << 20)),
        ridge_(options.number("ridge", 0.1, 1e-6, 1e6)) {
    const std::int64_t redraw_steps = options.integer("redraw_steps", 1000, 0, 1 << 30);
    // Places of queries, then of keys.
    sample_ = register_module(
        "sample", std::make_shared<RandomSubset>(config, 2 * config.max_tokens, redraw_steps));
  }

  void begin_step(std::int64_t step) override { sample_->begin_step(step); }

 protected:
  Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask,
                Context& context) override {
    check_tokens(config(), q.size(2));
    if (is_training()) begin_step(context.step);
    const WithoutAutocast exact;
    const Alignment alignment(key_mask);
    const Tensor rows = alignment.to_front(at_least_f32(q));
    const Tensor keys = alignment.to_front(at_least_f32(k));
    const Tensor values = alignment.to_front(at_least_f32(zero_padding(v, key_mask)));
    const auto [landmarks, counts] = choose_landmarks(rows, keys, alignment.key_mask());
    // Landmarks that are none: zeros in the kernel, so the ridge alone stands on their diagonal.
    const Tensor columns = counts.unsqueeze(1).unsqueeze(1).to(rows.scalar_type());
    const Tensor among = gaussian_kernel(landmarks, landmarks) * columns * columns.transpose(2, 3);
    const Tensor system = among + ridge_ * at::eye(among.size(-1), among.options());
    const Tensor right =
        columns.transpose(2, 3) * at::matmul(gaussian_kernel(landmarks, keys), values);
    // No eigenvalue is below the ridge, so the factor exists and nobody has to ask the device.
    const Tensor factor = std::get<0>(at::linalg_cholesky_ex(system));
    const Tensor solved = at::cholesky_solve(right, factor);
    const Tensor o = at::matmul(gaussian_kernel(rows, landmarks) * columns, solved);
    return alignment.back(o).to(v.scalar_type());
  }

 private:
  struct Landmarks {
    Tensor rows;    // [batch, heads, landmarks, channels]
    Tensor counts;  // bool [batch or 1, landmarks]
  };

  Landmarks choose_landmarks(const Tensor& q, const Tensor& k, const Tensor& key_mask) const {
    const std::int64_t tokens = q.size(2);
    const Tensor& all = sample_->priorities();
    const Tensor priorities =
        at::cat({all.narrow(0, 0, tokens), all.narrow(0, config().max_tokens, tokens)});
    const Tensor mask = key_mask.defined() ? at::cat({key_mask, key_mask}, 1) : key_mask;
    const auto choice = RandomSubset::choose(priorities, mask, std::min(landmarks_, 2 * tokens));
    const Tensor places = choice.places.unsqueeze(1).unsqueeze(-1);
    const Tensor stacked = at::cat({q, k}, 2);
    return {stacked.gather(2, places.expand({q.size(0), q.size(1), -1, q.size(3)})), choice.counts};
  }

  std::int64_t landmarks_;
  double ridge_;
  std::shared_ptr<RandomSubset> sample_;
};

std::shared_ptr<Attention> make_skyformer(const AttentionConfig& config, const Settings& options) {
  return std::make_shared<SkyformerAttention>(config, options);
}

}  // namespace

ZooEntry skyformer_entry() {
  return {.name = "skyformer",
          .summary = "exp(-|q - k|^2 / (2 sqrt D)) v, not normalised, by Nystroem on [Q; K]",
          .cost = "time N m D + m^3, memory N m; f32",
          .parameters = "none; the buffer sample.priorities [2 max_tokens]",
          .padding = "zero values, never landmarks",
          .causal = false,
          .takes_diag = true,
          .make = make_skyformer};
}

}  // namespace lln_torch
