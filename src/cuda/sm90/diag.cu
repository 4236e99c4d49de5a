// The Hopper family of LLN+Diag on the host: which calls it takes and what is launched. Heads are
// taken in slices whose tensors stay in the L2 cache from a pass to the next: a slice of a call's
// heads is a call. Calls that the problem does not show to be out of reach (a tensor that the copy
// engine cannot take, gradients with weights for channels) go to the tiled family.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/sm90/diag.h"

#include <algorithm>
#include <limits>

#include "cuda/device.h"
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

// A block that is longer than the sequence is the sequence.
std::int64_t block_of(const Problem& p) {
  return p.diag_block > kTileRows && p.tokens_k <= kTileRows ? kTileRows : p.diag_block;
}

std::string refusal(const Problem& p) {
  if (p.kind != Kind::lln_diag) return "takes kind lln+diag alone";
  if (p.dtype != DType::bf16) return "takes bf16 alone";
  if (tiled_width(p) != 64 && tiled_width(p) != 128) {
    return "takes the larger of dim and dim_v from 33 to 128";
  }
  if (kTileRows % block_of(p) != 0) {
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

// Key heads of a slice, with their query heads.
struct HeadRange {
  std::int64_t first, count;
};

// What both passes of a slice read should take no more than this, so that it is still in the L2
// cache when the second one reads it.
constexpr std::int64_t kSliceBytes = std::int64_t{36} << 20;

std::int64_t slice_heads(const Problem& p) {
  const std::int64_t heads =
      p.op == Op::forward ? 1 : p.heads / std::max<std::int64_t>(p.heads_k, 1);
  const std::int64_t bytes = p.batch * heads * p.tokens * (p.dim + p.dim_v) * 2;
  return std::clamp(kSliceBytes / std::max<std::int64_t>(bytes, 1), std::int64_t{1},
                    std::max<std::int64_t>(p.heads_k, 1));
}

void skip(Rows& rows, std::int64_t heads) {
  if (rows.data != nullptr) rows.data = static_cast<Bf16*>(rows.data) + heads * rows.head;
}
void skip(Scale& scale, std::int64_t heads) {
  if (scale.data != nullptr) scale.data += heads * scale.head;
}
void skip(Weight& weight, std::int64_t heads) {
  if (weight.data != nullptr) weight.data += heads * weight.head;
}
void skip(StateView& state, std::int64_t heads) {
  state.c += heads * state.c_head;
  state.values += heads * state.head;
}
void skip(Partials& sums, std::int64_t slots, std::int64_t dim, std::int64_t dim_v) {
  if (sums.m != nullptr) sums.m += slots * dim;
  if (sums.s != nullptr) sums.s += slots * dim;
  if (sums.values != nullptr) sums.values += slots * dim * dim_v;
}

// The heads of a call that a slice takes, as a call: its partial sums and the gradients of its
// states, which are scratch memory, lie behind each other as in a call of so many heads.
TiledCall slice_of(const TiledWork& work, const HeadRange& range) {
  TiledCall slice = work.tiled;
  DeviceCall& call = slice.call;
  const std::int64_t group = call.heads / call.heads_k;
  const std::int64_t skipped = range.first * group, dim = call.dim, dim_v = call.dim_v;
  for (Rows* rows : {&call.q, &call.o, &call.g, &call.dq}) skip(*rows, skipped);
  for (Rows* rows : {&call.k, &call.v, &call.dk, &call.dv}) skip(*rows, range.first);
  skip(call.alpha, skipped);
  skip(call.beta, range.first);
  skip(call.lln_weight, skipped);
  skip(call.diag_weight, skipped);
  call.heads = range.count * group;
  call.heads_k = range.count;
  skip(slice.state, range.first);
  skip(slice.keys, work.plan.key_jobs * range.first, dim, dim_v);
  skip(slice.rows, work.plan.row_jobs * skipped, dim, dim_v);
  if (slice.grads.c != nullptr) {
    const std::int64_t states = call.sequences.count * range.first;
    slice.grads.c += states * dim;
    slice.grads.values += states * dim * dim_v;
    slice.grads.c_sequence = range.count * dim;
    slice.grads.sequence = range.count * dim * dim_v;
  }
  return slice;
}

template <int kDim>
void forward(const TiledCall& tiled, const TiledPlan& plan, const TensorMaps& maps, int blocks) {
  launch_blocks<DiagRowsShape<kDim>>("diag_rows_forward", diag_rows_forward<kDim>,
                                     plan.row_jobs * tiled.call.heads, blocks, plan.stream, true,
                                     tiled, maps, static_cast<std::uint32_t>(plan.row_jobs));
}

template <int kDim>
void backward(const TiledCall& tiled, const TiledPlan& plan, const TensorMaps& maps, int blocks,
              bool overlapping) {
  const DeviceCall& call = tiled.call;
  const std::int64_t items = plan.row_jobs * call.heads;
  launch_blocks<RowsBackwardShape<kDim>>("diag_row_sums", diag_row_sums<kDim>, items, blocks,
                                         plan.stream, overlapping, tiled, maps,
                                         static_cast<std::uint32_t>(items));
  launch_join_rows(tiled, plan.stream);
  launch_blocks<DiagBackwardShape<kDim>>(
      "diag_backward",
      call.heads == call.heads_k ? diag_backward<kDim, false> : diag_backward<kDim, true>,
      plan.key_rows_jobs * call.heads_k, blocks, plan.stream, true, tiled, maps,
      static_cast<std::uint32_t>(plan.key_rows_jobs));
}

bool takes(const Call& call, const DeviceCall& device) {
  if (!tiled_takes(call)) return false;
  const bool channels = device.lln_weight.channel != 0 || device.diag_weight.channel != 0;
  return call.problem.op == Op::forward || !channels;
}

void run(const Call& call) {
  const Problem& p = call.problem;
  static const Kernel tiled_forward = tiled_diag_forward_kernels().front();
  static const Kernel tiled_backward = tiled_diag_backward_kernels().front();
  const Kernel& tiled = p.op == Op::forward ? tiled_forward : tiled_backward;
  const DeviceCall device = make_device_call(call);
  TensorMaps maps;
  if (!takes(call, device) || !make_tensor_maps(maps, device, p.batch, p.op)) {
    return tiled.run(call);
  }
  TiledWork work = prepare_tiled(call, kTileLog2);
  work.tiled.call.diag_block = block_of(p);
  const TiledPlan& plan = work.plan;
  const int blocks = multiprocessors(p.device.index);
  const std::int64_t each = slice_heads(p);
  for (std::int64_t head = 0; head < p.heads_k; head += each) {
    const TiledCall slice = slice_of(work, {head, std::min(each, p.heads_k - head)});
    if (each < p.heads_k) make_tensor_maps(maps, slice.call, p.batch, p.op);
    // The first kernel of a call waits for what came before it in the ordinary way.
    const bool overlapping = head > 0, with_state = !plan.state_given;
    if (with_state) launch_state(slice, plan, maps, blocks, overlapping);
    if (p.op == Op::forward) {
      plan.width == 64 ? forward<64>(slice, plan, maps, blocks)
                       : forward<128>(slice, plan, maps, blocks);
    } else {
      plan.width == 64 ? backward<64>(slice, plan, maps, blocks, overlapping || with_state)
                       : backward<128>(slice, plan, maps, blocks, overlapping || with_state);
    }
  }
}

}  // namespace
}  // namespace sm90

std::vector<Kernel> sm90_diag_forward_kernels() {
  return {{"cuda-sm90-diag", sm90::refusal, tiled_bytes, sm90::run}};
}
std::vector<Kernel> sm90_diag_backward_kernels() {
  return {{"cuda-sm90-diag", sm90::refusal, tiled_bytes, sm90::run}};
}

}  // namespace lln::cuda
