// What src/api asks of CUDA besides kernels. No header of CUDA is included here, so that it
// compiles everywhere: where the library is built without CUDA, host_absent.cc answers.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>

#include "lln/version.h"

namespace lln::cuda {

// Why this build has no CUDA; empty where it has.
std::string absence();

// Toolkit, architectures, and the devices of this machine.
BuildInfo::Cuda describe();

// Why no kernel of this build runs on a device: no driver, no such device, or a compute capability
// that the build has no code for. Empty when they do. Asked once per device and remembered.
std::string device_refusal(int index);

// Makes a device current for a scope.
class CurrentDevice {
 public:
  explicit CurrentDevice(int index);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  int before_ = 0;
  bool changed_ = false;
};

// Uninitialised memory of the current device, taken and given back in the order of a stream; a
// capture makes both part of its graph.
class Scratch {
 public:
  Scratch(std::size_t bytes, void* stream);
  ~Scratch();
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  std::byte* data() const noexcept { return data_; }  // null: there is not so much memory

 private:
  std::byte* data_ = nullptr;
  void* stream_ = nullptr;
};

// Throws Error(invalid_argument) about faults that earlier calls on this device left, and forgets
// them. Does not wait: a call that is still under way may report later.
void throw_reported_faults(int index);

}  // namespace lln::cuda
