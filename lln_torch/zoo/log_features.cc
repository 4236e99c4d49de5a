// Written so that no branch that is not taken has a gradient that is not finite.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/zoo/log_features.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "lln/problem.h"
#include "lln_torch/zoo/precision.h"
#include "math/feature_map.h"

namespace lln_torch {
namespace {

// The formulas of lln::log_feature.
at::Tensor log_feature(lln::Feature feature, double power, const at::Tensor& x) {
  switch (feature) {
    case lln::Feature::elu:
      return at::where(x.gt(0), at::relu(x).log1p(), x);
    case lln::Feature::relu:  // relu has gradient 0 at 0, clamp_min has not
      return (at::relu(x) + lln::kReluOffset).log();
    case lln::Feature::softplus: {
      const at::Tensor far = x.clamp_max(lln::kSoftplusSwitch);
      return at::where(x.lt(lln::kSoftplusSwitch), far - far.exp() / 2,
                       at::softplus(x.clamp_min(lln::kSoftplusSwitch)).log());
    }
    case lln::Feature::power: {
      // |x| at the floor, which small powers put below the smallest f32.
      const double least = std::max(std::pow(lln::kPowerFloor, 1 / power),
                                    double{std::numeric_limits<float>::min()});
      const at::Tensor size = x.abs(), above = size.gt(least);
      return at::where(above, power * at::where(above, size, 1).log(), std::log(lln::kPowerFloor));
    }
    case lln::Feature::exp:
      break;
  }
  return x;
}

}  // namespace

at::Tensor log_features(const std::string& feature, const at::Tensor& x, const at::Tensor& scale) {
  lln::Feature map = lln::Feature::exp;
  float power = 0;
  lln::parse_feature(feature, map, power);
  at::Tensor scaled = at_least_f32(x);
  if (scale.defined()) scaled = scaled * scale.view({1, -1, 1, 1});
  return log_feature(map, power, scaled).to(x.scalar_type());
}

}  // namespace lln_torch
