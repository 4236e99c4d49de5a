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

// Keys: feature = "exp" | "elu" | "relu" | "softplus" | "power" with power (2); matching = "none" |
// "paper" | "per_head" | "exact" | "entropy" (of each call), "ema" (running moments, ema_decay),
// "learned" (parameters) or "frozen" (buffers), the last two with alpha and beta to begin with;
// frozen with calibration, a file, in their place.
// per_head is the default, ema where causal, none for features other than exp.
class LlnAttention : public ProjectedAttention {
 public:
  // `feature` in place of the keys feature and matching, for attentions that are one map.
  LlnAttention(const AttentionConfig& config, const Settings& options, std::string feature = "");

  std::int64_t piece_unit() const override { return std::max<std::int64_t>(diag_block(), 1); }
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
  Tensor attend_both(const Projected& projected, const Tensor& x, const Tensor& key_mask,
                     Context& context) override;
  void describe(Observation& observation) const override;

 private:
  void read_feature(const Settings& options);
  void read_matching(const Settings& options);
  // Mode "frozen" by a file of `lln calibrate` over a dump of a run.
  void read_calibration(const std::string& file);
  // All of a call but the weights of the two parts.
  AttentionCall call(const Tensor& key_mask) const;
  // The call, on the whole sequence or on a piece of it, and a step of the running moments.
  Tensor run_call(const Projected& projected, const AttentionCall& call, const Context& context);
  void update_running(const Tensor& q, const Tensor& k, const Tensor& key_mask,
                      const Context& context);

  std::string feature_, matching_ = "none";
  double ema_decay_ = 0;
  Tensor running_;               // f64 [2, heads, 3] of "ema", as the core keeps them
  Tensor alpha_, beta_;          // [heads] of "frozen"
  Tensor log_alpha_, log_beta_;  // [heads] of "learned": the scales are positive
};

}  // namespace lln_torch
