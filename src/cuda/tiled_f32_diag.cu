// The tiled family of Diag and LLN+Diag in f32: which calls it takes and what is launched. The LLN
// part is that of tiled_f32.h, and Diag is added to its results in place: they are f32, so that
// nothing is lost on the way.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/tiled_f32_diag.h"

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/parameter_gradients.h"
#include "cuda/tiled_f32.h"
#include "cuda/tiled_f32_diag.cuh"
#include "cuda/tiled_f32_diag_backward.cuh"

namespace lln::cuda {
namespace {

constexpr int kLargest = 128;

std::string part_refusal(const Problem& p) {
  // Also where all sequences are shorter: others beside them must not change the kernel.
  if (p.diag_block > kDiagTile) return "takes blocks up to " + std::to_string(kDiagTile);
  // The widest gradients take more shared memory than some devices have.
  const bool narrow =
      p.op == Op::backward && lacks_shared_memory(p, FloatDiagBackwardShape<kLargest>::kShared);
  const int largest = narrow ? kLargest / 2 : kLargest;
  if (std::max(p.dim, p.dim_v) <= largest) return "";
  return "takes dim and dim_v up to " + std::to_string(largest);
}

std::string refusal(const Problem& p) {
  if (!p.has_diag()) return "takes kinds diag and lln+diag alone";
  if (p.dtype != DType::f32) return "takes f32 alone";
  if (p.causal && p.has_lln()) return "takes no causal lln+diag";
  const std::string why = part_refusal(p);
  if (!why.empty()) return why;
  Problem either = p;
  either.causal = false;  // a mask inside the tiles
  return tiled_refusal(either);
}

template <int kDim>
void launch_forward(const TiledCall& tiled, const TiledPlan& plan) {
  launch("float_diag_forward", float_diag_forward<kDim>,
         LaunchShape{plan.row_jobs * tiled.call.heads, kDiagThreads, kFloatDiagShared<kDim>,
                     plan.stream, tiled.adds},
         tiled);
}

template <int kDim>
void launch_backward(const TiledCall& tiled, const TiledPlan& plan) {
  using Shape = FloatDiagBackwardShape<kDim>;
  launch("float_diag_backward", float_diag_backward<kDim>,
         LaunchShape{plan.key_rows_jobs * tiled.call.heads_k, Shape::kThreads, Shape::kShared,
                     plan.stream, tiled.adds},
         tiled);
}

template <int kDim>
void launch_diag(Op op, const TiledWork& work) {
  (op == Op::backward ? launch_backward<kDim> : launch_forward<kDim>)(work.tiled, work.plan);
}

void launch_of_width(const Problem& p, const TiledWork& work) {
  switch (work.plan.width) {
    case 32:
      return launch_diag<32>(p.op, work);
    case 64:
      return launch_diag<64>(p.op, work);
    default:
      return launch_diag<128>(p.op, work);
  }
}

void run(const Call& call) {
  const Problem& p = call.problem;
  if (parameters_apart(call)) return run_with_parameters(call, run);
  if (!tiled_takes(call)) return run_plain(call);
  TiledWork work = prepare_tiled(call);
  if (p.has_lln()) launch_float_lln(p.op, work);
  work.tiled.adds = p.has_lln();
  launch_of_width(p, work);
}

}  // namespace

const DiagPart kFloatDiagPart = {part_refusal, prepare_diag_part, launch_of_width};

std::vector<Kernel> tiled_f32_diag_forward_kernels() {
  return {{"cuda-tiled-f32-diag", refusal, tiled_bytes, run, DeviceKind::cuda,
           /*takes_pieces=*/false, tiled_call_bytes}};
}
std::vector<Kernel> tiled_f32_diag_backward_kernels() { return tiled_f32_diag_forward_kernels(); }

}  // namespace lln::cuda
