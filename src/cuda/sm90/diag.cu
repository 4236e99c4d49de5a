// The Hopper family of LLN+Diag on the host: which calls it takes and what is launched. Calls that
// the problem does not show to be out of reach (a tensor that the copy engine cannot take,
// gradients with weights for channels) go to the tiled family.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/diag.h"

#include <algorithm>
#include <limits>

#include "cuda/device.h"
#include "cuda/parameter_gradients.h"
#include "cuda/sm90/diag_backward.cuh"
#include "cuda/sm90/diag_row_sums.cuh"
#include "cuda/sm90/diag_rows.cuh"
#include "cuda/sm90/launches.h"
#include "cuda/tiled_diag.h"
#include "cuda/tiled_plan.h"

namespace lln::cuda {
namespace sm90 {
namespace {

constexpr int kTileLog2 = 6;
static_assert(1 << kTileLog2 == kTileRows);

std::string refusal(const Problem& p) {
  if (p.kind != Kind::lln_diag) return "takes kind lln+diag alone";
  if (p.dtype != DType::bf16) return "takes bf16 alone";
  if (tiled_width(p) != 64 && tiled_width(p) != 128) {
    return "takes the larger of dim and dim_v from 33 to 128";
  }
  // Also where all sequences are shorter: others beside them must not change the kernel.
  if (kTileRows % p.diag_block != 0) {
    return "takes blocks that divide " + std::to_string(kTileRows);
  }
  if (p.tokens > std::numeric_limits<int>::max() - kTileRows) {
    return "takes fewer than 2^31 tokens";
  }
  if (std::string why = tiled_refusal(p); !why.empty()) return why;
  if (!has_sm90a_code(p.device.index)) {
    return "needs compute capability 9.0 and a build with code for sm_90a";
  }
  return "";
}

template <int kDim>
void forward(const TiledCall& tiled, const TiledPlan& plan, const TensorMaps& maps, int blocks) {
  launch_blocks<DiagRowsShape<kDim>>("diag_rows_forward", diag_rows_forward<kDim>,
                                     plan.row_jobs * tiled.call.heads, blocks, plan.stream, tiled,
                                     maps, static_cast<std::uint32_t>(plan.row_jobs));
}

template <int kDim>
void backward(const TiledCall& tiled, const TiledPlan& plan, const TensorMaps& maps, int blocks) {
  const DeviceCall& call = tiled.call;
  const std::int64_t items = plan.row_jobs * call.heads;
  launch_blocks<RowsBackwardShape<kDim>>("diag_row_sums", diag_row_sums<kDim>, items, blocks,
                                         plan.stream, tiled, maps,
                                         static_cast<std::uint32_t>(items));
  launch_join_rows(tiled, plan.stream);
  launch_blocks<DiagBackwardShape<kDim>>(
      "diag_backward",
      call.heads == call.heads_k ? diag_backward<kDim, false> : diag_backward<kDim, true>,
      plan.key_rows_jobs * call.heads_k, blocks, plan.stream, tiled, maps,
      static_cast<std::uint32_t>(plan.key_rows_jobs));
}

bool takes(const Call& call, const DeviceCall& device) {
  if (!tiled_takes(call) || call.problem.tokens == 0 || call.problem.tokens_k == 0) return false;
  const bool channels = device.lln_weight.channel != 0 || device.diag_weight.channel != 0;
  return call.problem.op == Op::forward || !channels;
}

void run(const Call& call) {
  const Problem& p = call.problem;
  static const Kernel tiled_forward = tiled_diag_forward_kernels().front();
  static const Kernel tiled_backward = tiled_diag_backward_kernels().front();
  const Kernel& tiled = p.op == Op::forward ? tiled_forward : tiled_backward;
  if (parameters_apart(call)) return run_with_parameters(call, run);
  const DeviceCall device = make_device_call(call);
  TensorMaps maps;
  if (!takes(call, device) || !make_tensor_maps(maps, device, p.batch, p.op)) {
    return tiled.run(call);
  }
  const TiledWork work = prepare_tiled(call, kTileLog2);
  const TiledPlan& plan = work.plan;
  const int blocks = multiprocessors(p.device.index);
  if (!plan.state_given) launch_state(work.tiled, plan, maps, blocks);
  if (p.op == Op::forward) {
    plan.width == 64 ? forward<64>(work.tiled, plan, maps, blocks)
                     : forward<128>(work.tiled, plan, maps, blocks);
  } else {
    plan.width == 64 ? backward<64>(work.tiled, plan, maps, blocks)
                     : backward<128>(work.tiled, plan, maps, blocks);
  }
}

}  // namespace
}  // namespace sm90

std::vector<Kernel> sm90_diag_forward_kernels() {
  return {{"cuda-sm90-diag", sm90::refusal, tiled_bytes, sm90::run, DeviceKind::cuda,
           /*takes_pieces=*/false, tiled_call_bytes}};
}
std::vector<Kernel> sm90_diag_backward_kernels() {
  return {{"cuda-sm90-diag", sm90::refusal, tiled_bytes, sm90::run, DeviceKind::cuda,
           /*takes_pieces=*/false, tiled_call_bytes}};
}

}  // namespace lln::cuda
