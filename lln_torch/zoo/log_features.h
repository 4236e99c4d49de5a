// The logarithms of positive feature maps as torch computes them, with gradients. LLN of these with
// the exponential is LLN with the map: phi(x) = exp(ln phi(x)). So maps for which a device has
// plain kernels alone run on those of the exponential.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace lln_torch {

// ln phi(scale x) in the type of x [batch, heads, tokens, channels]; scale [heads], or not defined
// (1). `feature` as the op takes it: "elu", "power2".
at::Tensor log_features(const std::string& feature, const at::Tensor& x, const at::Tensor& scale);

}  // namespace lln_torch
