// The tiled families of causal attention in f32 and f16: which calls they take and what is
// launched. Pieces, scratch memory and heads that are out of reach are those of
// tiled_causal_plan.h. Diag is added to the results of LLN in place, by the kernels that f32 and
// f16 have for it: results of f16 are then rounded twice.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/tiled_f32_causal.h"

#include <algorithm>
#include <type_traits>

#include "cuda/parameter_gradients.h"
#include "cuda/tiled_diag.h"
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

const DiagPart& diag_part(const Problem& p) {
  return p.dtype == DType::f32 ? kFloatDiagPart : kTiledDiagPart;
}

template <class T>
std::string refusal(const Problem& p) {
  constexpr bool kF32 = std::is_same_v<T, float>;
  if (p.dtype != (kF32 ? DType::f32 : DType::f16)) {
    return kF32 ? "takes f32 alone" : "takes f16 alone";
  }
  const std::string why = walk_refusal<T>(p);
  return why.empty() && p.has_diag() ? diag_part(p).refusal(p) : why;
}

std::size_t own_bytes(const Problem& p, int workers) {
  const std::size_t diag = p.has_diag() ? diag_part_bytes(p) : 0;
  return causal_bytes(p, causal_scratch_bytes(p) + diag, workers);
}

std::size_t bytes(const Problem& p, int workers) {
  return bytes_with_parameters(p, own_bytes(p, workers), workers);
}

std::size_t call_bytes(const Call& call, int workers) {
  const std::size_t own = own_bytes(call.problem, workers);
  return parameters_apart(call) ? bytes_with_parameters(call, own, workers) : own;
}

void run(const Call& call) {
  const Problem& p = call.problem;
  if (parameters_apart(call)) return run_with_parameters(call, run);
  if (!tiled_takes(call)) return run_plain(call);
  const CausalWork work = prepare_causal(call);
  const auto launch_walks = p.dtype == DType::f32 ? launch_float_causal<float> : launch_f16_causal;
  if (p.has_diag()) {
    Call diag_call = call;
    diag_call.workspace = call.workspace + causal_scratch_bytes(p);
    // Before the first kernel of LLN: those of Diag read their table of sequences early.
    const TiledWork diag = diag_part(p).prepare(diag_call);
    launch_walks(p, work);
    diag_part(p).launch(p, diag);
  } else {
    launch_walks(p, work);
  }
  run_plain_again(call, work);
}

}  // namespace

std::vector<Kernel> tiled_f32_causal_forward_kernels() {
  return {{"cuda-tiled-f32-causal", refusal<float>, bytes, run, DeviceKind::cuda,
           /*takes_pieces=*/false, call_bytes},
          {"cuda-tiled-f16-causal", refusal<F16>, bytes, run, DeviceKind::cuda,
           /*takes_pieces=*/false, call_bytes}};
}
std::vector<Kernel> tiled_f32_causal_backward_kernels() {
  return tiled_f32_causal_forward_kernels();
}

}  // namespace lln::cuda
