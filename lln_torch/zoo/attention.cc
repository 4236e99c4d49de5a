// What attentions over projected q, k and v share: projections, rotary positions, observation, and
// the combination with block-diagonal attention.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/zoo/attention.h"

#include <ATen/ATen.h>

#include "lln/error.h"

namespace lln_torch {
namespace {

bool name_has_diag(const std::string& name) { return name.ends_with("+diag"); }

// Pairs are (i, i + channels/2), as GPT-NeoX and HuggingFace's models have them. In f32: the angles
// of late positions do not survive 16 bits.
Tensor rotate(const Tensor& x, const Tensor& cosine, const Tensor& sine) {
  const auto halves = x.chunk(2, -1);
  const Tensor turned = at::cat({-halves[1], halves[0]}, -1);
  return (x * cosine + turned * sine).to(x.scalar_type());
}

}  // namespace

void Attention::begin_step(std::int64_t) {}

ProjectedAttention::ProjectedAttention(const AttentionConfig& config, const Settings& options,
                                       const ProjectionRules& rules)
    : config_(config) {
  const auto linear = [&](const char* name) {
    return register_module(
        name,
        torch::nn::Linear(torch::nn::LinearOptions(config_.dim, config_.dim).bias(config_.bias)));
  };
  query_ = linear("query");
  if (!rules.shared_qk) key_ = linear("key");
  value_ = linear("value");
  output_ = linear("output");
  if (!rules.takes_diag) return;
  const bool named = name_has_diag(config_.name);
  diag_ = options.choice("diag", named ? "average" : "none",
                         {"none", "average", "learned", "scales", "gate"});
  if (named && diag_ == "none") {
    options.refuse("diag",
                   "anything but \"none\", since the attention is \"" + config_.name + "\"");
  }
  if (diag_ == "none") return;
  diag_block_ = options.integer("diag_block", kDiagBlock, 1, kLargestDiagBlock);
  const auto half = [&] { return at::full({config_.heads, channels()}, 0.5); };
  if (diag_ == "learned") diag_mix_ = register_parameter("diag_mix", half());
  if (diag_ == "scales") {
    diag_far_ = register_parameter("diag_far", half());
    diag_near_ = register_parameter("diag_near", half());
  }
  if (diag_ == "gate") {
    diag_gate_ = register_module("diag_gate", torch::nn::Linear(config_.dim, config_.heads));
  }
}

Tensor ProjectedAttention::heads_of(const Tensor& x) const {
  return x.view({x.size(0), x.size(1), config_.heads, channels()}).transpose(1, 2);
}

ProjectedAttention::Projected ProjectedAttention::project_scored(const Tensor& x,
                                                                 const Context& context) {
  Projected projected;
  projected.q = heads_of(query_->forward(x));
  projected.k = key_.is_empty() ? projected.q : heads_of(key_->forward(x));
  if (context.rotary_cos.defined()) {
    projected.q = rotate(projected.q, context.rotary_cos, context.rotary_sin);
    projected.k =
        key_.is_empty() ? projected.q : rotate(projected.k, context.rotary_cos, context.rotary_sin);
  }
  return projected;
}

ProjectedAttention::Projected ProjectedAttention::project(const Tensor& x, const Context& context) {
  Projected projected = project_scored(x, context);
  projected.v = heads_of(value_->forward(x));
  return projected;
}

Tensor ProjectedAttention::project_output(const Tensor& o) {
  return output_->forward(o.transpose(1, 2).reshape({o.size(0), o.size(2), config_.dim}));
}

ProjectedAttention::PartWeights ProjectedAttention::part_weights(const Tensor& x) {
  if (diag_ == "learned") return {.far = diag_mix_};
  if (diag_ == "scales") return {diag_far_, diag_near_};
  if (diag_ == "gate") {
    return {.far = at::sigmoid(diag_gate_->forward(x)).transpose(1, 2)};
  }
  return {};
}

Tensor ProjectedAttention::attend_both(const Projected& projected, const Beside&, const Tensor& x,
                                       const Tensor& key_mask, Context& context) {
  const auto& [q, k, v] = projected;
  const Tensor far = attend(q, k, v, key_mask, context);
  if (diag_ == "none") return far;
  const Tensor near = block_diagonal(q, k, v, key_mask, diag_block_, config_.causal);
  const PartWeights weights = part_weights(x);
  if (!weights.far.defined()) return 0.5 * (far + near);
  // Per head and channel, or per head and token: the missing axis of the two.
  const std::int64_t axis = weights.far.dim() == 2 ? 1 : -1;
  const Tensor far_weight = weights.far.unsqueeze(axis);
  if (!weights.near.defined()) return near + far_weight * (far - near);
  return far_weight * far + weights.near.unsqueeze(axis) * near;
}

ProjectedAttention::Beside ProjectedAttention::begin_beside(const Projected&, const Tensor&,
                                                            const Context&) {
  return {};
}

void ProjectedAttention::describe(Observation&) const {}

void ProjectedAttention::refuse_pieces() const {
  throw lln::Error(lln::ErrorCode::unsupported,
                   "attention \"" + config_.name +
                       "\" needs its sequences whole: they cannot lie in "
                       "pieces on several ranks, as with diag, the feature maps, and lln and "
                       "lln+diag without centred_keys, wide, two_sided and chain");
}

Tensor ProjectedAttention::forward(const Tensor& x, const Tensor& key_mask, Context& context) {
  if (context.pieces != nullptr) {
    if (piece_unit() == 0) refuse_pieces();
  } else if (x.size(1) == 0) {  // a piece without tokens takes part all the same
    return at::zeros_like(x);
  }
  Projected projected = project_scored(x, context);
  Beside beside = context.side_work ? begin_beside(projected, key_mask, context) : Beside{};
  projected.v = heads_of(value_->forward(x));
  if (beside.work) beside.work->join();
  if (context.observer != nullptr) {
    Observation observation{.layer = config_.layer,
                            .name = config_.name,
                            .q = projected.q.detach(),
                            .k = projected.k.detach(),
                            .key_mask = key_mask};
    describe(observation);
    context.observer->observe(observation);
  }
  const Tensor output = project_output(attend_both(projected, beside, x, key_mask, context));
  if (beside.state_again && output.requires_grad()) {
    output.register_hook([again = beside.state_again](const Tensor&) { again->begin(); });
  }
  return output;
}

Tensor zero_padding(const Tensor& x, const Tensor& key_mask) {
  if (!key_mask.defined()) return x;
  return x.masked_fill(key_mask.logical_not().unsqueeze(1).unsqueeze(-1), 0);
}

}  // namespace lln_torch
