// Informer's ProbSparse attention: a sample of the keys shows which queries are peaked, those
// attend to all keys, and the others, whose weights would be nearly flat, get the mean of the
// values.
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

// M_i = max - mean of q_i . k_j / sqrt D over ceil(factor ln n) sampled keys j; the ceil(factor ln
// n) queries of largest M are active, n the number of tokens that count.
class InformerAttention : public ProjectedAttention {
 public:
  InformerAttention(const AttentionConfig& config, const Settings& options)
      : ProjectedAttention(config, options), factor_(options.number("factor", 5, 1e-3, 1e6)) {
    const std::int64_t redraw_steps = options.integer("redraw_steps", 1000, 0, 1 << 30);
    sample_ = register_module(
        "sample", std::make_shared<RandomSubset>(config, config.max_tokens, redraw_steps));
  }

  void begin_step(std::int64_t step) override { sample_->begin_step(step); }

 protected:
  Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask,
                Context& context) override {
    const std::int64_t tokens = q.size(2);
    check_tokens(config(), tokens);
    if (is_training()) begin_step(context.step);
    const Alignment alignment(key_mask);
    const Tensor rows = alignment.to_front(q), keys = alignment.to_front(k);
    const Tensor values = alignment.to_front(zero_padding(v, key_mask));
    const Tensor counts = token_counts(key_mask, q, tokens).clamp_min(1);  // [batch or 1, 1]
    const Tensor active = (factor_ * counts.to(at::kDouble).log()).ceil().clamp_min(1);
    const std::int64_t most = most_active(tokens);

    const Tensor peaked = peakedness(rows, keys, alignment.key_mask(), active, most);
    const Tensor chosen = std::get<1>(peaked.topk(most, -1));  // [batch, heads, most]
    const Tensor wide = chosen.unsqueeze(-1).expand({-1, -1, -1, q.size(3)});
    const Tensor full = full_attention(rows.gather(2, wide), keys, values, alignment.key_mask());

    // In f32: neither the count nor the sum of a long sequence is a 16-bit number.
    const Tensor mean = (at_least_f32(values).sum(2, true) / counts.unsqueeze(-1).unsqueeze(-1))
                            .to(values.scalar_type());
    // Shorter sequences of the batch have fewer active queries.
    const Tensor is_active = at::arange(most, counts.options()).lt(active);  // [batch or 1, most]
    const Tensor found = at::where(is_active.unsqueeze(1).unsqueeze(-1), full, mean);
    return alignment.back(mean.expand_as(q).scatter(2, wide, found.to(mean.scalar_type())));
  }

 private:
  std::int64_t most_active(std::int64_t tokens) const {
    const double count = std::ceil(factor_ * std::log(static_cast<double>(tokens)));
    return std::clamp(static_cast<std::int64_t>(count), std::int64_t{1}, tokens);
  }

  // [batch, heads, tokens]; it only chooses, so no gradient goes through it.
  Tensor peakedness(const Tensor& q, const Tensor& k, const Tensor& key_mask, const Tensor& active,
                    std::int64_t most) const {
    const at::NoGradGuard no_gradients;
    const WithoutAutocast exact;
    const auto choice =
        RandomSubset::choose(sample_->priorities().narrow(0, 0, q.size(2)), key_mask, most);
    const Tensor taken =
        choice.counts.logical_and(at::arange(most, active.options()).lt(active));  // [batch, most]
    const Tensor places = choice.places.unsqueeze(1).unsqueeze(-1);
    const Tensor sampled =
        at_least_f32(k).gather(2, places.expand({k.size(0), k.size(1), -1, k.size(3)}));
    const Tensor scores = at::matmul(at_least_f32(q), sampled.transpose(2, 3)) /
                          std::sqrt(static_cast<double>(q.size(3)));
    const Tensor left_out = taken.logical_not().unsqueeze(1).unsqueeze(1);
    const Tensor size = taken.sum(1).clamp_min(1).view({-1, 1, 1});
    const Tensor measure = scores.masked_fill(left_out, -INFINITY).amax(-1) -
                           scores.masked_fill(left_out, 0).sum(-1) / size;
    if (!key_mask.defined()) return measure;
    return measure.masked_fill(key_mask.logical_not().unsqueeze(1), -INFINITY);
  }

  double factor_;
  std::shared_ptr<RandomSubset> sample_;
};

std::shared_ptr<Attention> make_informer(const AttentionConfig& config, const Settings& options) {
  return std::make_shared<InformerAttention>(config, options);
}

}  // namespace

ZooEntry informer_entry() {
  return {.name = "informer",
          .summary = "ProbSparse: the c ln N most peaked queries attend, others get the mean of v",
          .cost = "time c N ln N D, memory N D",
          .parameters = "none; the buffer sample.priorities [max_tokens]",
          .padding = "neither sampled, counted nor active; N is the number of tokens that count",
          .causal = false,
          .takes_diag = true,
          .make = make_informer};
}

}  // namespace lln_torch
