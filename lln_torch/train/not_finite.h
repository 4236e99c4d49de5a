// When a loss or gradient is not finite: the batch, the operation and the layer that it came from,
// and what the instruments say of the layers, found by running the step again and watching.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "lln_torch/models/model.h"
#include "lln_torch/train/train_step.h"

namespace lln_torch {

class NotFinite : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// What is to be told of step `sums.bad_step`, whose batch is `parts`. The model is as it was before
// that step. Its gradients change.
std::string describe_not_finite(Model& model, const std::vector<Batch>& parts, const StepSums& sums,
                                const StepOptions& options, const torch::Device& device,
                                bool causal);

}  // namespace lln_torch
