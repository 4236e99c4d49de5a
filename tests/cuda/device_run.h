// Running the API on device memory, and skipping where there is no device.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>
#include <gtest/gtest.h>

#include <string>

#include "attention_run.h"
#include "conformance/device_data.h"
#include "lln/version.h"

namespace lln::test {

using conformance::CaseViews;
using conformance::DeviceData;
using conformance::DeviceMemory;

inline constexpr Device kDevice = cuda_device();

// Why device 0 cannot be used; empty where it can.
inline std::string no_device() {
  const BuildInfo::Cuda cuda = build_info().cuda;
  return cuda.devices.empty() ? cuda.no_devices : cuda.devices.front().refusal;
}

class OnDevice : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = no_device(); !reason.empty()) {
      GTEST_SKIP() << "no CUDA device for this test: " << reason;
    }
  }
  void TearDown() override {
    if (IsSkipped()) return;
    ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
  }
};

// With a stream of its own.
class OnStream : public OnDevice {
 protected:
  void SetUp() override {
    OnDevice::SetUp();
    if (IsSkipped()) return;
    ASSERT_EQ(cudaStreamCreate(&stream_), cudaSuccess);
  }
  void TearDown() override {
    OnDevice::TearDown();
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
  }

  cudaStream_t stream_ = nullptr;
};

inline void call(const Case& c, const CaseViews& views, const Exec& exec) {
  if (c.problem.op == Op::forward) {
    attention_forward(views.in, views.out, conformance::options(c), exec);
  } else {
    attention_backward(views.in, views.grads, conformance::options(c), exec);
  }
}

// Forward or backward of a case of host memory, on device 0. `shift` as in DeviceData.
inline TensorSet run_on_device(const Case& c, const Inputs& in, const Exec& exec = {},
                               std::size_t shift = 0) {
  TensorSet outputs = conformance::make_outputs(c, in, c.problem.dtype);
  DeviceData data(kDevice, in, outputs, shift);
  call(c, data.views(), exec);
  data.fetch();
  return outputs;
}

inline TensorSet run_on_device(const Case& c) {
  return run_on_device(c, conformance::make_inputs(c, c.problem.dtype));
}

// The problem of a case, on device 0.
inline Problem on_device(Problem problem) {
  problem.device = kDevice;
  return problem;
}

inline void expect_same_bits(const TensorSet& found, const TensorSet& expected,
                             const std::string& what) {
  for (const TensorSet::Entry& entry : found.entries()) {
    EXPECT_EQ(entry.tensor.bytes() == expected.at(entry.name).bytes(), true)
        << entry.name << " of " << what << ": "
        << first_difference(entry.tensor, 0, expected.at(entry.name));
  }
}

// What the kernels of a device compute, in the types that they compute it in.
inline constexpr const char* kDeviceKinds[] = {"lln",           "lln:causal", "diag16",
                                               "diag16:causal", "lln+diag32", "lln+diag32:causal"};
inline constexpr const char* kDeviceTypes[] = {"f32", "f16", "bf16"};
inline constexpr const char* kDeviceOps[] = {"forward", "backward"};

}  // namespace lln::test
