// AdamW, SGD and clipping by lists of tensors.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/train/optimizer.h"

#include <ATen/ATen.h>

#include <set>

#include "lln/error.h"

namespace lln_torch {

Optimizer::Optimizer(const torch::nn::Module& model, const OptimizerOptions& options)
    : options_(options) {
  groups_ = {{.weight_decay = options.weight_decay}, {.weight_decay = 0}};
  std::set<const void*> seen;
  for (const auto& item : model.named_parameters()) {
    at::Tensor parameter = item.value();
    if (!parameter.requires_grad() || !seen.insert(parameter.unsafeGetTensorImpl()).second) {
      continue;
    }
    if (!step_.defined()) step_ = at::zeros({}, parameter.options().dtype(at::kFloat));
    parameter.mutable_grad() = at::zeros_like(parameter);
    // Shares of LLN and Diag start at one half: decay would pull them from there.
    const bool matrix = parameter.dim() >= 2 && item.key().find("diag_") == std::string::npos;
    Group& group = groups_[options.decay_all || matrix ? 0 : 1];
    group.parameters.push_back(parameter);
    group.gradients.push_back(parameter.grad());
    parameters_.push_back(parameter);
    gradients_.push_back(parameter.grad());
    if (options.kind == OptimizerKind::sgd) continue;
    group.averages.push_back(at::zeros_like(parameter).detach());
    group.squares.push_back(at::zeros_like(parameter).detach());
    group.steps.push_back(step_);
    state_.emplace("exp_avg." + item.key(), group.averages.back());
    state_.emplace("exp_avg_sq." + item.key(), group.squares.back());
  }
  if (gradients_.empty()) {
    throw lln::Error(lln::ErrorCode::invalid_argument, "the model has no parameters to train");
  }
  state_.emplace("step", step_);
}

void Optimizer::zero_gradients() { at::_foreach_zero_(gradients_); }

at::Tensor Optimizer::clip(double most) {
  const at::NoGradGuard no_gradients;
  const at::Tensor norm = at::stack(at::_foreach_norm(gradients_, 2)).norm();
  if (most > 0) {
    // The addition keeps a norm of zero from dividing.
    const at::Tensor share = at::clamp_max(most / (norm + 1e-6), 1.0);
    at::_foreach_mul_(gradients_, share);
  }
  return norm;
}

void Optimizer::update(const at::Tensor& learning_rate, const at::Tensor& skip) {
  const at::NoGradGuard no_gradients;
  step_.add_(1 - skip);
  for (Group& group : groups_) {
    if (group.parameters.empty()) continue;
    if (options_.kind == OptimizerKind::sgd) {
      at::_fused_sgd_(group.parameters, group.gradients, {}, group.weight_decay, /*momentum=*/0,
                      learning_rate, /*dampening=*/0, /*nesterov=*/false, /*maximize=*/false,
                      /*is_first_step=*/false, /*grad_scale=*/{}, skip);
      continue;
    }
    at::_fused_adamw_(group.parameters, group.gradients, group.averages, group.squares, {},
                      group.steps, learning_rate, options_.beta1, options_.beta2,
                      group.weight_decay, options_.epsilon, /*amsgrad=*/false, /*maximize=*/false,
                      /*grad_scale=*/{}, skip);
  }
}

NamedTensors Optimizer::state() const { return state_; }

}  // namespace lln_torch
