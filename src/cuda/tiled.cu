// The tiled family of LLN on the host: which calls it takes and what is launched. Calls that the
// problem does not show to be out of reach (an unaligned tensor, in f16 the gradient of a scale) go
// to the plain family.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/tiled.h"

#include <algorithm>

#include "cuda/parameter_gradients.h"
#include "cuda/tiled_plan.h"

namespace lln::cuda {
namespace {

std::string refusal(const Problem& p) {
  if (p.kind != Kind::lln) return "takes kind lln alone";
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) return "takes bf16 and f16 alone";
  const bool narrow = lacks_shared_memory(p, kWideLlnBytes);
  const std::int64_t largest_narrow = p.op == Op::backward ? 64 : 128;
  const std::int64_t largest = narrow ? largest_narrow : kTiledWidths[3];
  if (std::max(p.dim, p.dim_v) > largest) {
    return "takes dim and dim_v up to " + std::to_string(largest);
  }
  return tiled_refusal(p);
}

void run(const Call& call) {
  const Problem& p = call.problem;
  if (parameters_apart(call)) return run_with_parameters(call, run);
  if (!tiled_takes(call)) return run_plain(call);
  const TiledWork work = prepare_tiled(call);
  const TiledLaunches& launches = p.dtype == DType::bf16 ? kTiledBf16 : kTiledF16;
  (p.op == Op::backward ? launches.backward : launches.forward)(work.tiled, work.plan);
}

}  // namespace

std::vector<Kernel> tiled_forward_kernels() {
  return {{"cuda-tiled", refusal, tiled_bytes, run, DeviceKind::cuda, /*takes_pieces=*/true,
           tiled_call_bytes}};
}
std::vector<Kernel> tiled_backward_kernels() { return tiled_forward_kernels(); }

}  // namespace lln::cuda
