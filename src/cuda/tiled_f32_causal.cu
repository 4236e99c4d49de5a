// The tiled families of causal attention in f32 and f16: which calls they take and what is
// launched. Pieces, scratch memory and heads that are out of reach are those of
// tiled_causal_plan.h. Diag is added to the results of LLN in place (tiled_f32_diag.h), which f16
// would round twice.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/tiled_f32_causal.h"

#include <algorithm>

#include "cuda/tiled_f32_causal_launch.cuh"
#include "cuda/tiled_f32_diag.h"

namespace lln::cuda {
namespace {

constexpr int kLargest = 128;

// Why walks with elements of T do not take a problem.
template <class T>
std::string walk_refusal(const Problem& p) {
  // The widest ones take more shared memory than some devices have.
  const int needed = p.op == Op::backward ? FloatCausalKeysShape<T, kLargest>::kShared
                                          : FloatCausalForwardShape<T, kLargest>::kShared;
  const int largest = lacks_shared_memory(p, needed) ? kLargest / 2 : kLargest;
  if (std::max(p.dim, p.dim_v) > largest) {
    return "takes dim and dim_v up to " + std::to_string(largest);
  }
  return causal_refusal(p);
}

std::string f32_refusal(const Problem& p) {
  if (p.dtype != DType::f32) return "takes f32 alone";
  const std::string why = walk_refusal<float>(p);
  return why.empty() && p.has_diag() ? float_diag_refusal(p) : why;
}

std::string f16_refusal(const Problem& p) {
  if (p.dtype != DType::f16) return "takes f16 alone";
  if (p.kind != Kind::lln) return "takes kind lln alone";
  return walk_refusal<F16>(p);
}

std::size_t bytes(const Problem& p, int workers) {
  const std::size_t diag = p.has_diag() ? float_diag_bytes(p) : 0;
  return causal_bytes(p, causal_scratch_bytes(p) + diag, workers);
}

void run(const Call& call) {
  const Problem& p = call.problem;
  if (!tiled_takes(call)) return plain_kernel(p.op).run(call);
  const CausalWork work = prepare_causal(call);
  if (p.has_diag()) {
    Call diag_call = call;
    diag_call.workspace = call.workspace + causal_scratch_bytes(p);
    // Before the first kernel of LLN: those of Diag read their table of sequences early.
    const TiledWork diag = prepare_float_diag(diag_call);
    launch_float_causal<float>(p, work);
    launch_float_diag(p.op, diag);
  } else {
    (p.dtype == DType::f32 ? launch_float_causal<float> : launch_f16_causal)(p, work);
  }
  run_plain_again(call, work);
}

}  // namespace

std::vector<Kernel> tiled_f32_causal_forward_kernels() {
  return {{"cuda-tiled-f32-causal", f32_refusal, bytes, run, DeviceKind::cuda},
          {"cuda-tiled-f16-causal", f16_refusal, bytes, run, DeviceKind::cuda}};
}
std::vector<Kernel> tiled_f32_causal_backward_kernels() {
  return tiled_f32_causal_forward_kernels();
}

}  // namespace lln::cuda
