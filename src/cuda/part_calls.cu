// Which kernel runs a part, what is left of a call for it, and where its gradients lie.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/part_calls.h"

#include <algorithm>

#include "cuda/tiled_plan.h"
#include "cuda/weighed_rows.h"

namespace lln::cuda {

Problem part_of(Problem p, Kind kind) {
  p.kind = kind;
  if (kind == Kind::lln) {
    p.diag_block = 0;
    p.block_origins = false;
  } else {
    p.feature = Feature::exp;
    p.power = Problem{}.power;
  }
  return p;
}

Call part_of(const Call& call, Kind kind) {
  Call part = call;
  part.problem = part_of(call.problem, kind);
  part.options.kind = kind;
  part.in.mix = part.in.lln_weight = part.in.diag_weight = {};
  if (kind == Kind::lln) {
    part.in.block_origins = {};
  } else {
    part.in.alpha = part.in.beta = {};
  }
  part.out = {};
  part.grads = {};
  return part;
}

const Kernel* part_kernel(const Problem& part) {
  const auto all = kernels(part.op);
  const auto found = std::ranges::find_if(all, [&](const Kernel& kernel) {
    const bool pieces = !part.is_piece() || kernel.takes_pieces;
    return kernel.device == DeviceKind::cuda && pieces && kernel.refusal(part).empty();
  });
  return found == all.end() ? nullptr : &*found;
}

std::size_t part_bytes(const Problem& part, int workers) {
  return part_kernel(part)->workspace_bytes(part, workers);
}

void run_part(const Call& part) {
  const Kernel& kernel = *part_kernel(part.problem);
  // The plain kernels know nothing of padding.
  if (kernel.name == plain_kernel(part.problem.op).name) return run_plain(part);
  kernel.run(part);
}

View scratch_like(const ConstView& tensor, std::byte* data) {
  return {data, tensor.dtype, tensor.device, tensor.shape, contiguous_stride(tensor.shape)};
}

std::size_t scratch_bytes(const Problem& p, std::int64_t heads, std::int64_t tokens,
                          std::int64_t channels) {
  Layout layout(nullptr);
  layout.take<std::byte>(p.batch * heads * tokens * channels *
                         static_cast<std::int64_t>(size_of(p.dtype)));
  return layout.bytes();
}

std::size_t part_gradient_bytes(const Problem& p) {
  return scratch_bytes(p, p.heads, p.tokens, p.dim_v) + scratch_bytes(p, p.heads, p.tokens, p.dim) +
         scratch_bytes(p, p.heads_k, p.tokens_k, p.dim) +
         scratch_bytes(p, p.heads_k, p.tokens_k, p.dim_v);
}

AttentionGradients part_gradients(const Call& call, std::byte* data) {
  const Problem& p = call.problem;
  const auto next = [&](const ConstView& tensor) {
    std::byte* const at = data;
    data += scratch_bytes(p, tensor.shape[1], tensor.shape[2], tensor.shape[3]);
    return scratch_like(tensor, at);
  };
  AttentionGradients grads;
  grads.g = next(call.grads.g);
  grads.dq = next(call.grads.dq);
  grads.dk = next(call.grads.dk);
  grads.dv = next(call.grads.dv);
  return grads;
}

void weigh_gradient(const Call& call, const Weight& weight, std::byte* data) {
  launch_weighed_rows(scratch_like(call.grads.g, data), {call.grads.g, weight}, {},
                      static_cast<cudaStream_t>(call.stream));
}

}  // namespace lln::cuda
