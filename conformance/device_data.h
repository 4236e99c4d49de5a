// The data of a case on a device: copies of its inputs, poisoned outputs, and the way back.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <deque>
#include <utility>
#include <vector>

#include "conformance/data.h"
#include "conformance/device_memory.h"

namespace lln::conformance {

// What a call of a case is given, wherever its tensors are.
struct CaseViews {
  AttentionInputs in;
  AttentionOutputs out;
  AttentionGradients grads;  // without saved
};
CaseViews host_views(const Inputs& in, TensorSet& outputs);

class DeviceData {
 public:
  // Every tensor starts `shift` elements past a multiple of 256 bytes.
  DeviceData(Device device, const Inputs& in, TensorSet& outputs, std::size_t shift = 0);

  const CaseViews& views() const { return views_; }
  // A copy, as the views of a call take it.
  ConstView copy(const Tensor& tensor);
  IndexView copy(const IndexView& values);
  // The outputs, back into the tensors that they were made from. Throws Error where a guard of any
  // tensor was overwritten, an input's too.
  void fetch();

 private:
  DeviceMemory& place(std::span<const std::byte> bytes, std::size_t shift);
  View output(TensorSet& outputs, const char* name);

  Device device_;
  std::size_t shift_;
  std::deque<DeviceMemory> memory_;
  std::vector<std::pair<Tensor*, const DeviceMemory*>> outputs_;
  CaseViews views_;
};

}  // namespace lln::conformance
