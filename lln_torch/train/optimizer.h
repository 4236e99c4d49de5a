// AdamW, or plain SGD, over all parameters of a model in torch's fused kernels, with gradient
// clipping. Everything that changes from step to step is a tensor on the device of the model, so
// that a step can be captured in a CUDA graph, and nothing is read back.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include <string>
#include <vector>

#include "lln_torch/train/named_tensors.h"

namespace lln_torch {

enum class OptimizerKind { adamw, sgd };

struct OptimizerOptions {
  OptimizerKind kind = OptimizerKind::adamw;
  // Of AdamW.
  double beta1 = 0.9;
  double beta2 = 0.999;
  double epsilon = 1e-8;
  // Of AdamW on its own, of SGD as a part of the gradient.
  double weight_decay = 0.01;
  // Otherwise matrices alone decay: neither biases nor the scales of norms.
  bool decay_all = false;
};

class Optimizer {
 public:
  // Of the parameters that require gradients; one shared by two modules counts once.
  Optimizer(const torch::nn::Module& model, const OptimizerOptions& options);

  // Gradients to zero, in place: their memory is the same at every step.
  void zero_gradients();
  // The norm of all gradients, a scalar; where `most` is above zero they are scaled down to it.
  at::Tensor clip(double most);
  // learning_rate and skip are f32 scalars on the device; nothing changes where skip is 1.
  void update(const at::Tensor& learning_rate, const at::Tensor& skip);

  // Of AdamW exp_avg.NAME and exp_avg_sq.NAME, of both step: references.
  NamedTensors state() const;
  // All that it changes, in the order of the model.
  const std::vector<at::Tensor>& parameters() const { return parameters_; }

 private:
  struct Group {
    double weight_decay = 0;
    std::vector<at::Tensor> parameters, gradients, averages, squares, steps;
  };
  OptimizerOptions options_;
  std::vector<Group> groups_;
  std::vector<at::Tensor> parameters_, gradients_;  // of all groups, in the order of the model
  at::Tensor step_;                                 // f32 scalar, shared by all parameters
  NamedTensors state_;
};

}  // namespace lln_torch
