// Which gradients are asked for decides what is run around a call, and in which memory.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/parameter_gradients.h"

#include "cuda/scale_gradients.h"
#include "cuda/tiled_plan.h"
#include "cuda/weight_gradients.h"

namespace lln::cuda {

Call without_parameters(const Call& call) { return without_scales(without_weights(call)); }

bool parameters_apart(const Call& call) {
  if (!wants_scales(call) && !wants_weights(call)) return false;
  if (wants_scales(call) && !has_scales(call.problem)) return false;
  return tiled_takes(without_parameters(call));
}

std::size_t bytes_with_parameters(const Problem& p, std::size_t rest, int workers) {
  if (p.op != Op::backward || !p.has_lln()) return rest;
  if (p.has_diag()) rest = bytes_with_weights(p, rest, workers);
  return has_scales(p) ? bytes_with_scales(p, rest, workers) : rest;
}

std::size_t bytes_with_parameters(const Call& call, std::size_t rest, int workers) {
  if (wants_weights(call)) rest = bytes_with_weights(call.problem, rest, workers);
  return wants_scales(call) ? bytes_with_scales(call.problem, rest, workers) : rest;
}

void run_with_parameters(const Call& call, void (*run)(const Call&)) {
  (wants_scales(call) ? run_with_scales : run_with_weights)(call, run);
}

}  // namespace lln::cuda
