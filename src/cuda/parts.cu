// The calls of the parts, and the family of both: which problems it takes, what lies in scratch
// memory, and what is launched.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/parts.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "cuda/launch.h"
#include "cuda/padded_copy.h"
#include "cuda/tiled_plan.h"
#include "cuda/weighed_rows.h"
#include "cuda/weight_gradients.h"

namespace lln::cuda {
namespace {

constexpr const char* kName = "cuda-parts";

// Null where no kernel takes it.
const Kernel* kernel_for(const Problem& part) {
  const auto all = kernels(part.op);
  const auto found = std::ranges::find_if(all, [&](const Kernel& kernel) {
    const bool pieces = !part.is_piece() || kernel.takes_pieces;
    return kernel.device == DeviceKind::cuda && pieces && kernel.refusal(part).empty();
  });
  return found == all.end() ? nullptr : &*found;
}

bool is_plain(const Kernel& kernel, Op op) { return kernel.name == plain_kernel(op).name; }

std::string refusal(const Problem& p) {
  if (p.device.kind != DeviceKind::cuda) return "is for tensors on CUDA devices";
  if (p.kind != Kind::lln_diag) return "takes kind lln+diag alone";
  std::string plain;
  for (const Kind kind : {Kind::lln, Kind::diag}) {
    const Problem part = part_of(p, kind);
    const Kernel* const kernel = kernel_for(part);
    if (kernel == nullptr) return "no kernel takes " + to_string(part);
    if (!is_plain(*kernel, p.op)) return "";
    plain += (plain.empty() ? "" : " and ") + to_string(part);
  }
  return plain + " are both for " + plain_kernel(p.op).name;
}

// Forward the LLN part of o, backward part_gradients().
std::size_t tensor_bytes(const Problem& p) {
  return p.op == Op::backward ? part_gradient_bytes(p)
                              : scratch_bytes(p, p.heads, p.tokens, p.dim_v);
}

std::size_t own_bytes(const Problem& p, int workers) {
  return tensor_bytes(p) + std::max(part_bytes(part_of(p, Kind::lln), workers),
                                    part_bytes(part_of(p, Kind::diag), workers));
}

std::size_t call_bytes(const Call& call, int workers) {
  const std::size_t own = own_bytes(call.problem, workers);
  return wants_weights(call) ? bytes_with_weights(call.problem, own, workers) : own;
}

// Kernels write no row of sequences whose cumulative lengths are wrong.
void clear_packed(const Call& call, std::initializer_list<View> results) {
  if (!call.problem.packed) return;
  RowCopies zeros;
  for (const View& rows : results) zeros.add(rows, {});
  zeros.launch("zero_rows", static_cast<cudaStream_t>(call.stream));
}

void forward(const Call& call, const DeviceCall& device) {
  Call lln = part_of(call, Kind::lln), diag = part_of(call, Kind::diag);
  lln.workspace = diag.workspace = call.workspace + tensor_bytes(call.problem);
  lln.out = {.o = scratch_like(call.out.o, call.workspace), .saved = call.out.saved};
  diag.out.o = call.out.o;
  clear_packed(call, {lln.out.o, call.out.o});
  run_part(lln);
  run_part(diag);
  launch_weighed_rows(call.out.o, {lln.out.o, device.lln_weight}, {call.out.o, device.diag_weight},
                      static_cast<cudaStream_t>(call.stream));
}

void backward(const Call& call, const DeviceCall& device) {
  const auto stream = static_cast<cudaStream_t>(call.stream);
  const AttentionGradients& grads = call.grads;
  Call lln = part_of(call, Kind::lln), diag = part_of(call, Kind::diag);
  lln.workspace = diag.workspace = call.workspace + tensor_bytes(call.problem);
  diag.grads = part_gradients(call, call.workspace);
  lln.grads = {.g = diag.grads.g,
               .saved = grads.saved,
               .dq = grads.dq,
               .dk = grads.dk,
               .dv = grads.dv,
               .dalpha = grads.dalpha,
               .dbeta = grads.dbeta};
  clear_packed(call, {grads.dq, grads.dk, grads.dv, diag.grads.dq, diag.grads.dk, diag.grads.dv});
  weigh_gradient(call, device.lln_weight, diag.grads.g);
  run_part(lln);
  weigh_gradient(call, device.diag_weight, diag.grads.g);
  run_part(diag);
  constexpr Weight kWhole{.constant = 1};
  for (const auto& [to, add] :
       {std::pair{grads.dq, diag.grads.dq}, {grads.dk, diag.grads.dk}, {grads.dv, diag.grads.dv}}) {
    launch_weighed_rows(to, {to, kWhole}, {add, kWhole}, stream);
  }
}

}  // namespace

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

std::size_t part_bytes(const Problem& part, int workers) {
  return kernel_for(part)->workspace_bytes(part, workers);
}

void run_part(const Call& part) {
  const Kernel& kernel = *kernel_for(part.problem);
  if (is_plain(kernel, part.problem.op)) return run_plain(part);
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

void weigh_gradient(const Call& call, const Weight& weight, const ConstView& to) {
  const View rows{const_cast<void*>(to.data), to.dtype, to.device, to.shape, to.stride};
  launch_weighed_rows(rows, {call.grads.g, weight}, {}, static_cast<cudaStream_t>(call.stream));
}

std::size_t parts_bytes(const Problem& p, int workers) {
  const std::size_t own = own_bytes(p, workers);
  return p.op == Op::backward ? bytes_with_weights(p, own, workers) : own;
}

void run_parts(const Call& call) {
  if (wants_weights(call)) return run_with_weights(call, run_parts);
  (call.problem.op == Op::backward ? backward : forward)(call, make_device_call(call));
}

std::vector<Kernel> parts_forward_kernels() {
  return {{kName, refusal, parts_bytes, run_parts, DeviceKind::cuda, /*takes_pieces=*/false,
           call_bytes}};
}
std::vector<Kernel> parts_backward_kernels() { return parts_forward_kernels(); }

}  // namespace lln::cuda
