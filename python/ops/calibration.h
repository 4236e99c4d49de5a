// alpha and beta of one layer from moments that were pooled over many batches.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>
#include <tuple>

#include "lln_torch/binding/tensors.h"

namespace lln_torch {

using binding::Tensor;

// Moments f64 [heads_k, 3] in host memory: count, mean and squared deviations -> alpha [heads],
// beta [heads_k], and the number of key heads that a limit was applied to, [].
std::tuple<Tensor, Tensor, Tensor> calibrate(const Tensor& q_moments, const Tensor& k_moments,
                                             std::int64_t heads, std::int64_t dim,
                                             std::int64_t sequences, const std::string& mode);

}  // namespace lln_torch
