// Tensors of moments to those of the core, and its scales to tensors.
// SPDX-License-Identifier: Apache-2.0
#include "ops/calibration.h"

#include <algorithm>
#include <array>
#include <tuple>
#include <vector>

#include "lln/calibration.h"
#include "lln/error.h"

namespace lln_torch {
namespace {

using binding::new_host_tensor;
using binding::ScalarType;

// [heads, 3] of f64, contiguous: count, mean and squared deviations.
std::vector<lln::Moments> moments_of(const char* name, const Tensor& x) {
  if (x.dim() != 2 || x.size(1) != 3 || x.scalar_type() != ScalarType::Double ||
      !x.is_contiguous()) {
    throw lln::Error(lln::ErrorCode::invalid_argument,
                     std::string(name) + " is not a contiguous float64 tensor [heads, 3]");
  }
  const auto* numbers = static_cast<const double*>(x.data_ptr());
  std::vector<lln::Moments> moments;
  for (std::int64_t i = 0; i < x.size(0); ++i, numbers += 3) {
    moments.push_back({numbers[0], numbers[1], numbers[2]});
  }
  return moments;
}

Tensor scale_tensor(const std::vector<float>& numbers) {
  Tensor x =
      new_host_tensor(std::array{static_cast<std::int64_t>(numbers.size())}, ScalarType::Float);
  std::copy(numbers.begin(), numbers.end(), static_cast<float*>(x.data_ptr()));
  return x;
}

}  // namespace

std::tuple<Tensor, Tensor, Tensor> calibrate(const Tensor& q_moments, const Tensor& k_moments,
                                             std::int64_t heads, std::int64_t dim,
                                             std::int64_t sequences, const std::string& mode) {
  std::vector<lln::ClampedHead> clamped;
  const lln::CalibratedLayer layer =
      lln::calibrate(lln::PooledMoments{.heads = heads,
                                        .dim = dim,
                                        .q = moments_of("q_moments", q_moments),
                                        .k = moments_of("k_moments", k_moments),
                                        .sequences = sequences},
                     lln::parse_matching(mode), &clamped);
  Tensor count = new_host_tensor(std::array<std::int64_t, 0>{}, ScalarType::Long);
  *static_cast<std::int64_t*>(count.data_ptr()) = static_cast<std::int64_t>(clamped.size());
  return {scale_tensor(layer.alpha), scale_tensor(layer.beta), count};
}

}  // namespace lln_torch
