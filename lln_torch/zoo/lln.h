// LLN attention and the other positive feature maps, through the core, with or without Diag in the
// same pass. Its class is open to whoever continues it token by token.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <string>
#include <utility>

#include "lln_torch/ops/attention.h"
#include "lln_torch/zoo/attention.h"

namespace lln_torch {

// x [batch, heads, tokens, channels] as it is, through whose gradient `scale` [heads], not 0, gets
// its own: a feature map sees their product alone. For a call that takes scale.detach().
Tensor carrying(const Tensor& x, const Tensor& scale);

// Keys: feature = "exp" | "elu" | "relu" | "softplus" | "power" with power (2); matching = "none" |
// "paper" | "per_head" | "exact" | "entropy" (of each call), "ema" (running moments, ema_decay),
// "learned" (parameters) or "frozen" (buffers), the last two with alpha and beta to begin with;
// frozen with calibration, a file, in their place.
// per_head is the default, ema where causal, none for features other than exp.
//
// Not causal, and each with or without the others: centred_keys = true (keys less their mean over
// the tokens), wide = F (q and k of a head times one learned matrix [D, F] before the map),
// two_sided = true (features of [x, -x]), chain = "contrast" (o + l (o - P o) for o = P v, with a
// learned l per head in (0, 1)). alpha and beta are matched on what the map takes.
class LlnAttention : public ProjectedAttention {
 public:
  // `feature` in place of the keys feature and matching, for attentions that are one map.
  LlnAttention(const AttentionConfig& config, const Settings& options, std::string feature = "");

  std::int64_t piece_unit() const override {
    return varied() ? 0 : std::max<std::int64_t>(diag_block(), 1);
  }
  const std::string& matching() const { return matching_; }
  const std::string& feature() const { return feature_; }  // as the op takes it: "power2"

  // alpha and beta, f32 [heads], of the modes that do not read the sequence: none, ema, learned and
  // frozen. Throws lln::Error in the others.
  std::pair<Tensor, Tensor> fixed_scales() const;
  // Mode "frozen": alpha and beta [heads] for good.
  void set_frozen_scales(const Tensor& alpha, const Tensor& beta);

 protected:
  Tensor attend(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& key_mask,
                Context& context) override;
  Tensor attend_both(const Projected& projected, const Beside& beside, const Tensor& x,
                     const Tensor& key_mask, Context& context) override;
  Beside begin_beside(const Projected& projected, const Tensor& key_mask,
                      const Context& context) override;
  void describe(Observation& observation) const override;

 private:
  void read_feature(const Settings& options);
  void read_variants(const Settings& options);
  void read_matching(const Settings& options);
  // Mode "frozen" by a file of `lln calibrate` over a dump of a run.
  void read_calibration(const std::string& file);
  // Whether q and k are changed before the map, or the chain takes a second step.
  bool varied() const;
  // q and k as the map takes them.
  Projected mapped(const Projected& projected, const Tensor& key_mask) const;
  // Whether the map is torch's affair (log_features.h): its kernels on CUDA devices are plain ones.
  bool features_outside(const Tensor& q, const Context& context) const;
  // Whether gradients of scales are: in f16 the core has them in its plain kernels on CUDA devices.
  bool scales_outside(const Tensor& q, const Context& context) const;
  // Whether alpha and beta come from q and k of the call.
  bool matches_each_call() const;
  // All of a call but the weights of the two parts.
  AttentionCall call(const Tensor& key_mask) const;
  // The call, on the whole sequence or on a piece of it, and a step of the running moments.
  Tensor run_call(const Projected& projected, const AttentionCall& call, const Context& context);
  void update_running(const Tensor& q, const Tensor& k, const Tensor& key_mask,
                      const Context& context);

  std::string feature_, matching_ = "none";
  bool centred_keys_ = false, two_sided_ = false;
  Tensor wide_;                // [heads, channels, wide]
  Tensor chain_;               // [heads]: l is its sigmoid
  std::int64_t features_ = 0;  // of a head: the channels of q and k as the map takes them
  double ema_decay_ = 0;
  Tensor running_;               // f64 [2, heads, 3] of "ema", as the core keeps them
  Tensor alpha_, beta_;          // [heads] of "frozen"
  Tensor log_alpha_, log_beta_;  // [heads] of "learned": the scales are positive
};

}  // namespace lln_torch
