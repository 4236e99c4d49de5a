// alpha and beta of one layer from data that come in batches: moments of q and k are pooled, and
// the scales found once. lln/calibration.h writes them to a file, which `lln` and Python read, too.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <utility>
#include <vector>

#include "lln/calibration.h"
#include "lln_torch/ops/matching.h"

namespace lln_torch {

class LayerCalibration {
 public:
  // Takes the sequences of one call of the layer; all calls have the same heads and channels. Waits
  // for tensors on a device.
  void take(const at::Tensor& q, const at::Tensor& k, const TokenChoice& tokens = {});
  const lln::PooledMoments& moments() const { return pooled_; }
  // In mode paper, per_head, exact or entropy. `clamped`, where given, gets the heads that a limit
  // was applied to.
  lln::CalibratedLayer layer(const std::string& name, const std::string& mode = "entropy",
                             std::vector<lln::ClampedHead>* clamped = nullptr) const;

 private:
  lln::PooledMoments pooled_;
};

// alpha [heads] and beta [heads_k] of a layer, f32.
std::pair<at::Tensor, at::Tensor> scale_tensors(const lln::CalibratedLayer& layer,
                                                at::Device device = at::kCPU);

}  // namespace lln_torch
