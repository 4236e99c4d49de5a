// Written so that no branch that is not taken has a gradient that is not finite. The maps are those
// of the core, which a test holds these against.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/zoo/log_features.h"

#include <ATen/ATen.h>

#include <cmath>
#include <string_view>

#include "lln/error.h"
#include "lln_torch/zoo/precision.h"

namespace lln_torch {
namespace {

constexpr double kReluOffset = 1e-3, kPowerFloor = 1e-12;
constexpr double kSoftplusSwitch = -8;  // below, ln(softplus(x)) = x - e^x / 2 to 1e-7

at::Tensor log_feature(const std::string& feature, const at::Tensor& x) {
  if (feature == "elu") return at::where(x.gt(0), x.clamp_min(0).log1p(), x);
  if (feature == "relu") return (x.clamp_min(0) + kReluOffset).log();
  if (feature == "softplus") {
    const at::Tensor far = x.clamp_max(kSoftplusSwitch);
    return at::where(x.lt(kSoftplusSwitch), far - far.exp() / 2,
                     at::softplus(x.clamp_min(kSoftplusSwitch)).log());
  }
  constexpr std::string_view kPower = "power";
  if (feature.starts_with(kPower)) {
    const double power = std::stod(feature.substr(kPower.size()));
    return power * x.abs().clamp_min(std::pow(kPowerFloor, 1 / power)).log();
  }
  throw lln::Error(lln::ErrorCode::invalid_argument, "no feature map \"" + feature + "\"");
}

}  // namespace

at::Tensor log_features(const std::string& feature, const at::Tensor& x, const at::Tensor& scale) {
  at::Tensor scaled = at_least_f32(x);
  if (scale.defined()) scaled = scaled * scale.view({1, -1, 1, 1});
  return log_feature(feature, scaled).to(x.scalar_type());
}

}  // namespace lln_torch
