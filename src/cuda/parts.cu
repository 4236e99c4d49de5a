// The family of two calls: which problems it takes, what lies in scratch memory, what is launched.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/parts.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "cuda/launch.h"
#include "cuda/padded_copy.h"
#include "cuda/parameter_gradients.h"
#include "cuda/part_calls.h"
#include "cuda/tiled_plan.h"
#include "cuda/weighed_rows.h"
#include "cuda/weight_gradients.h"

namespace lln::cuda {
namespace {

constexpr const char* kName = "cuda-parts";

// The LLN part is what costs: where the plain kernels have it, they have both.
std::string refusal(const Problem& p) {
  if (p.device.kind != DeviceKind::cuda) return "is for tensors on CUDA devices";
  if (p.kind != Kind::lln_diag) return "takes kind lln+diag alone";
  for (const Kind kind : {Kind::lln, Kind::diag}) {
    if (part_kernel(part_of(p, kind)) == nullptr) {
      return "no kernel takes " + to_string(part_of(p, kind));
    }
  }
  const Problem lln = part_of(p, Kind::lln);
  const std::string& plain = plain_kernel(p.op).name;
  return part_kernel(lln)->name == plain ? to_string(lln) + " is for " + plain : "";
}

// Copies of these make tensors of other dims whole; of unaligned ones the plain kernels have both
// parts at once.
bool is_for_plain(const Call& call) {
  const Problem& p = call.problem;
  return p.dim % 8 == 0 && p.dim_v % 8 == 0 && !tiled_takes(without_parameters(call));
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
  weigh_gradient(call, device.lln_weight, call.workspace);
  run_part(lln);
  weigh_gradient(call, device.diag_weight, call.workspace);
  run_part(diag);
  constexpr Weight kWhole{.constant = 1};
  for (const auto& [to, add] :
       {std::pair{grads.dq, diag.grads.dq}, {grads.dk, diag.grads.dk}, {grads.dv, diag.grads.dv}}) {
    launch_weighed_rows(to, {to, kWhole}, {add, kWhole}, stream);
  }
}

}  // namespace

std::size_t parts_bytes(const Problem& p, int workers) {
  const std::size_t own = own_bytes(p, workers);
  return std::max(p.op == Op::backward ? bytes_with_weights(p, own, workers) : own,
                  plain_kernel(p.op).workspace_bytes(p, workers));
}

std::size_t parts_call_bytes(const Call& call, int workers) {
  const Problem& p = call.problem;
  if (is_for_plain(call)) return plain_kernel(p.op).workspace_bytes(p, workers);
  const std::size_t own = own_bytes(p, workers);
  return wants_weights(call) ? bytes_with_weights(p, own, workers) : own;
}

void run_parts(const Call& call) {
  if (is_for_plain(call)) return run_plain(call);
  if (wants_weights(call)) return run_with_weights(call, run_parts);
  (call.problem.op == Op::backward ? backward : forward)(call, make_device_call(call));
}

std::vector<Kernel> parts_forward_kernels() {
  return {{kName, refusal, parts_bytes, run_parts, DeviceKind::cuda, /*takes_pieces=*/false,
           parts_call_bytes}};
}
std::vector<Kernel> parts_backward_kernels() { return parts_forward_kernels(); }

}  // namespace lln::cuda
