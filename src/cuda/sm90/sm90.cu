// The Hopper family on the host: which calls it takes and what is launched. Calls that the problem
// does not show to be out of reach (a tensor that the copy engine cannot take) go to the tiled
// family.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/sm90.h"

#include <algorithm>
#include <limits>

#include "cuda/device.h"
#include "cuda/parameter_gradients.h"
#include "cuda/sm90/keys.cuh"
#include "cuda/sm90/keys_backward.cuh"
#include "cuda/sm90/launches.h"
#include "cuda/sm90/rows.cuh"
#include "cuda/sm90/rows_backward.cuh"
#include "cuda/sm90/short_forward.cuh"
#include "cuda/tiled.h"
#include "cuda/tiled_plan.h"

namespace lln::cuda {
namespace sm90 {
namespace {

constexpr int kTileLog2 = 6;
static_assert(1 << kTileLog2 == kTileRows);

std::string refusal(const Problem& p) {
  if (p.kind != Kind::lln) return "takes kind lln alone";
  if (p.dtype != DType::bf16) return "takes bf16 alone";
  if (tiled_width(p) != 64 && tiled_width(p) != 128) {
    return "takes the larger of dim and dim_v from 33 to 128";
  }
  if (std::max(p.tokens, p.tokens_k) > std::numeric_limits<int>::max() - kTileRows) {
    return "takes fewer than 2^31 tokens";
  }
  if (std::string why = tiled_refusal(p); !why.empty()) return why;
  if (!has_sm90a_code(p.device.index)) {
    return "needs compute capability 9.0 and a build with code for sm_90a";
  }
  return "";
}

template <int kDim>
struct Launches {
  const TiledCall& tiled;
  const TiledPlan& plan;
  const TensorMaps& maps;
  int multiprocessors;

  template <class Shape, class... Parameters, class... Arguments>
  void start(const char* name, void (*kernel)(Parameters...), std::int64_t items,
             const Arguments&... arguments) const {
    launch_blocks<Shape>(name, kernel, items, multiprocessors, plan.stream, tiled, maps,
                         arguments...);
  }

  void state() const {
    if (plan.has_keys) {
      const std::int64_t items = plan.key_jobs * tiled.call.heads_k;
      start<KeysShape<kDim>>("key_sums", key_sums<kDim>, items, static_cast<std::uint32_t>(items),
                             plan.whole);
      if (!plan.whole) launch_join_keys(tiled, plan.stream);
    }
    launch_given_state(tiled, plan);
  }
  // In one launch: where the keys of a sequence are one piece, and there are about as many heads as
  // multiprocessors. Fewer heads fill the device better in two launches that overlap, and more of
  // them gain nothing (H200, docs/kernels.md).
  bool forward_short() const {
    const std::int64_t heads = tiled.call.sequences.count * tiled.call.heads_k;
    if (!plan.whole || heads > multiprocessors || 2 * heads < multiprocessors) return false;
    if (tiled.given.given() || !plan.has_rows) return false;
    start<ShortShape<kDim>>("short_forward", short_forward<kDim>, heads);
    return true;
  }
  void forward() const {
    if (forward_short()) return;
    state();
    if (!plan.has_rows) return;
    start<RowsShape<kDim>>("rows_forward", rows_forward<kDim>, plan.row_jobs * tiled.call.heads,
                           static_cast<std::uint32_t>(plan.row_jobs));
  }
  void backward() const {
    if (!plan.state_given) state();
    if (plan.has_rows) {
      const std::int64_t items = plan.row_jobs * tiled.call.heads;
      start<RowsBackwardShape<kDim>>("rows_backward", rows_backward<kDim>, items,
                                     static_cast<std::uint32_t>(items));
      launch_join_rows(tiled, plan.stream);
    }
    launch_state_gradients(tiled, plan);
    if (!plan.has_keys) return;
    start<KeysBackwardShape<kDim>>("keys_backward", keys_backward<kDim>,
                                   plan.key_rows_jobs * tiled.call.heads_k,
                                   static_cast<std::uint32_t>(plan.key_rows_jobs));
  }
};

template <int kDim>
void run_width(const Problem& p, const TiledWork& work, const TensorMaps& maps) {
  const Launches<kDim> launches{work.tiled, work.plan, maps, multiprocessors(p.device.index)};
  p.op == Op::forward ? launches.forward() : launches.backward();
}

// Whether no kernel is launched over tensors without tokens, which the copy engine cannot describe:
// of a call that is not of a piece something may be left to write there.
bool has_own_work(const Call& call) {
  const Problem& p = call.problem;
  const bool backward = p.op == Op::backward;
  if (p.tokens_k == 0 && !call.in.state.given()) return false;
  return p.tokens > 0 || !backward || call.grads.dsaved.given();
}

void run(const Call& call) {
  const Problem& p = call.problem;
  static const Kernel forward = tiled_forward_kernels().front();
  static const Kernel backward = tiled_backward_kernels().front();
  const Kernel& tiled = p.op == Op::forward ? forward : backward;
  if (parameters_apart(call)) return run_with_parameters(call, run);
  TensorMaps maps{};
  if (!tiled_takes(call) || !has_own_work(call) ||
      !make_tensor_maps(maps, make_device_call(call), p.batch, p.op)) {
    return tiled.run(call);
  }
  const TiledWork work = prepare_tiled(call, kTileLog2);
  work.plan.width == 64 ? run_width<64>(p, work, maps) : run_width<128>(p, work, maps);
}

}  // namespace

void launch_state(const TiledCall& tiled, const TiledPlan& plan, const TensorMaps& maps,
                  int multiprocessors) {
  plan.width == 64 ? Launches<64>{tiled, plan, maps, multiprocessors}.state()
                   : Launches<128>{tiled, plan, maps, multiprocessors}.state();
}

}  // namespace sm90

std::vector<Kernel> sm90_forward_kernels() {
  return {{"cuda-sm90", sm90::refusal, tiled_bytes, sm90::run, DeviceKind::cuda,
           /*takes_pieces=*/true, tiled_call_bytes}};
}
std::vector<Kernel> sm90_backward_kernels() { return sm90_forward_kernels(); }

}  // namespace lln::cuda
