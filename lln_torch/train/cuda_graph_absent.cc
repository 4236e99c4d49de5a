// Where there is no CUDA toolkit steps are not captured.
// SPDX-License-Identifier: Apache-2.0
#include "lln/error.h"
#include "lln_torch/train/cuda_graph.h"

namespace lln_torch {

std::string step_graph_obstacle() {
  return "this program was built without the CUDA toolkit, whose headers CUDA graphs need";
}

struct StepGraph::Impl {};

StepGraph::StepGraph() { throw lln::Error(lln::ErrorCode::unsupported, step_graph_obstacle()); }
StepGraph::~StepGraph() = default;
void StepGraph::run(const std::function<void()>&) {}

}  // namespace lln_torch
