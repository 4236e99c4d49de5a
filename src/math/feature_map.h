// The positive feature maps as f = ln(phi) and its derivative: LLN needs nothing else of them,
// since its weights are softmaxes of f(alpha q) and f(beta k). Scalar truths shared by all back
// ends.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>

#include "lln/problem.h"
#include "math/host_device.h"

namespace lln {

inline constexpr double kReluOffset = 1e-3;    // phi = max(x, 0) + offset: rows are never all zero
inline constexpr double kPowerFloor = 1e-12;   // phi = max(|x|^p, floor)
inline constexpr double kSoftplusSwitch = -8;  // below, ln(softplus(x)) = x - e^x / 2 to 1e-7
// Exponents are clamped to this: alpha q + c stays finite in f32, an infinite input acts as its
// limit.
inline constexpr double kExponentLimit = 1e38;

template <class T>
struct LogFeature {
  T value;       // f(x)
  T derivative;  // f'(x)
};

template <class T>
LLN_HOST_DEVICE LogFeature<T> log_feature(Feature feature, T power, T x) {
  switch (feature) {
    case Feature::exp:
      return {x, T(1)};
    case Feature::elu:
      return x <= 0 ? LogFeature<T>{x, T(1)} : LogFeature<T>{std::log1p(x), T(1) / (T(1) + x)};
    case Feature::relu:
      if (std::isnan(x)) return {x, x};
      return x > 0 ? LogFeature<T>{std::log(x + T(kReluOffset)), T(1) / (x + T(kReluOffset))}
                   : LogFeature<T>{std::log(T(kReluOffset)), T(0)};
    case Feature::softplus: {
      if (x < T(kSoftplusSwitch)) {
        const T e = std::exp(x);
        return {x - e / 2, T(1) - e / 2};
      }
      const T softplus = (x > 0 ? x : T(0)) + std::log1p(std::exp(-std::abs(x)));
      return {std::log(softplus), T(1) / (T(1) + std::exp(-x)) / softplus};
    }
    case Feature::power: {
      if (std::isnan(x)) return {x, x};
      const T floor = std::log(T(kPowerFloor));
      const T value = power * std::log(std::abs(x));
      return value > floor ? LogFeature<T>{value, power / x} : LogFeature<T>{floor, T(0)};
    }
  }
  return {x, T(1)};
}

template <class T>
LLN_HOST_DEVICE T clamp_exponent(T x) {
  if (x > T(kExponentLimit)) return T(kExponentLimit);
  if (x < -T(kExponentLimit)) return -T(kExponentLimit);
  return x;  // NaN stays
}

}  // namespace lln
