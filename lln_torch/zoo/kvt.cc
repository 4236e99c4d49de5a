// k-NN attention (KVT): each row keeps its k largest scores and takes the softmax over them.
// Quadratic: it is about noise, not about cost.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "lln_torch/zoo/attention.h"
#include "lln_torch/zoo/precision.h"

namespace lln_torch {
namespace {

class KvtAttention : public ProjectedAttention {
 public:
  KvtAttention(const AttentionConfig& config, const Settings& options)
      : ProjectedAttention(config, options),
        kept_(options.integer("top_k", 0, 0, std::numeric_limits<std::int32_t>::max())) {}

 protected:
  Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask,
                Context&) override {
    const WithoutAutocast plain;
    const std::int64_t tokens = q.size(2);
    const double scale = 1 / std::sqrt(static_cast<double>(q.size(-1)));
    Tensor scores = at::matmul(at_least_f32(q) * scale, at_least_f32(k).transpose(-1, -2));
    const double lowest = -std::numeric_limits<double>::infinity();
    const auto boolean = q.options().dtype(at::kBool);
    Tensor hidden = key_mask.defined() ? key_mask.logical_not().unsqueeze(1).unsqueeze(1)
                                       : at::zeros({1, 1, 1, tokens}, boolean);
    if (config().causal) {
      hidden = hidden.logical_or(at::ones({tokens, tokens}, boolean).triu(1));
    }
    scores = scores.masked_fill(hidden, lowest);
    hidden = hidden.logical_or(scores.detach().lt(smallest_kept(scores.detach(), hidden)));
    // Equal scores are kept together. A row that sees no key has no weights: softmax would be NaN.
    const Tensor none = hidden.all(-1, /*keepdim=*/true);
    const Tensor weights =
        scores.masked_fill(hidden, lowest).masked_fill(none, 0).softmax(-1).masked_fill(none, 0);
    return at::matmul(weights, at_least_f32(v)).to(v.scalar_type());
  }

 private:
  // The k-th largest score of each row, [batch, heads, tokens, 1]. By default k is half of the keys
  // that the row sees, rounded up: neither padding nor tokens to come change it.
  Tensor smallest_kept(const Tensor& scores, const Tensor& hidden) const {
    const std::int64_t tokens = scores.size(-1);
    const std::int64_t most = kept_ > 0 ? std::min(kept_, tokens) : (tokens + 1) / 2;
    const Tensor largest = std::get<0>(scores.topk(most, -1));
    if (kept_ > 0) return largest.narrow(-1, most - 1, 1);
    const Tensor seen = hidden.logical_not().sum(-1, /*keepdim=*/true);  // [.., tokens or 1, 1]
    const Tensor place = at::div(seen + 1, 2, "floor").clamp_min(1) - 1;
    return largest.gather(-1, place.expand({scores.size(0), scores.size(1), tokens, 1}));
  }

  std::int64_t kept_;  // 0: half of the keys that a row sees
};

std::shared_ptr<Attention> make_kvt(const AttentionConfig& config, const Settings& options) {
  return std::make_shared<KvtAttention>(config, options);
}

}  // namespace

ZooEntry kvt_entry() {
  return {.name = "kvt",
          .summary = "softmax over the top_k largest scores of a row (default: half of its keys)",
          .cost = "time N^2 D, memory N^2",
          .parameters = "none",
          .padding = "masked keys, not counted in a row's half",
          .causal = true,
          .takes_diag = true,
          .make = make_kvt};
}

}  // namespace lln_torch
