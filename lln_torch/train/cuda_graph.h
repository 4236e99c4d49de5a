// The step of a training captured once in a CUDA graph and replayed: a small model is otherwise
// bound by the time that launching its kernels takes. In cuda_graph.cc where the CUDA toolkit is
// found, in cuda_graph_absent.cc elsewhere.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <memory>
#include <string>

namespace lln_torch {

// Why steps cannot be captured in this build or on this machine; empty where they can.
std::string step_graph_obstacle();

// Runs a body that reads and writes the same memory at every call: the first calls as they are, on
// a stream of their own, then one is captured, and all later ones are replays of it.
class StepGraph {
 public:
  StepGraph();
  ~StepGraph();
  StepGraph(const StepGraph&) = delete;
  StepGraph& operator=(const StepGraph&) = delete;
  void run(const std::function<void()>& body);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace lln_torch
