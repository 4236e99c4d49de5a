// Patches of pixels before the layers: the body of a ViT.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <fmt/format.h>
#include <torch/nn/init.h>

#include "lln/error.h"
#include "lln_torch/models/body.h"

namespace lln_torch {

ImageBody::ImageBody(const BodyConfig& config, const Settings& attention) : config_(config) {
  patch_ = register_module(
      "patch", torch::nn::Linear(config.channels * config.patch * config.patch, config.dim));
  init_linear(*patch_, config.init_std);
  if (config.cls_token) {
    cls_ = register_parameter("cls", at::zeros({config.dim}));
    torch::nn::init::normal_(cls_, 0, config.init_std);
  }
  if (config.positions == "learned") {
    positions_ = register_parameter("positions", at::zeros({config.max_tokens, config.dim}));
    torch::nn::init::normal_(positions_, 0, config.init_std);
  }
  stack_ = register_module("stack", std::make_shared<Stack>(config, attention));
}

Tensor ImageBody::forward(const Tensor& pixels, Context& context) {
  const std::int64_t rows = pixels.size(0), side = config_.patch;
  const std::int64_t expected = config_.channels * config_.height * config_.width;
  if (pixels.numel() != rows * expected) {
    throw lln::Error(
        lln::ErrorCode::invalid_argument,
        fmt::format("{} pixels in {} rows, but the model takes {} x {} x {} = {} a row",
                    pixels.numel(), rows, config_.channels, config_.height, config_.width,
                    expected));
  }
  const std::int64_t down = config_.height / side, across = config_.width / side;
  // [rows, channels, down, side, across, side] -> [rows, down * across, channels * side * side]
  const Tensor patches = pixels.reshape({rows, config_.channels, down, side, across, side})
                             .permute({0, 2, 4, 1, 3, 5})
                             .reshape({rows, down * across, config_.channels * side * side});
  Tensor x = patch_(patches);
  if (cls_.defined()) x = at::cat({cls_.to(x.dtype()).expand({rows, 1, config_.dim}), x}, 1);
  if (positions_.defined()) x = x + positions_;
  return stack_->forward(drop(x, config_.dropout, is_training()), {}, context);
}

}  // namespace lln_torch
