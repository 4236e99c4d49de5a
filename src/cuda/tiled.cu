// The tiled family on the host: which calls it takes, how its scratch memory is laid out, and what
// is launched. Calls that the problem does not show to be out of reach (an unaligned tensor, the
// gradient of a parameter) go to the plain family.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/tiled.h"

#include <algorithm>

#include "cuda/device.h"
#include "cuda/plain.h"
#include "cuda/tiled_launch.h"

namespace lln::cuda {
namespace {

int width_of(const Problem& p) {
  for (const std::int64_t width : kTiledWidths) {
    if (std::max(p.dim, p.dim_v) <= width) return static_cast<int>(width);
  }
  return 0;
}

// Partial sums take dim * dim_v numbers a piece: wider heads have longer pieces, so that the sums
// stay a small part of the traffic.
Jobs sum_jobs(const Problem& p) {
  return {8, width_of(p) <= 64 ? 10 : width_of(p) == 128 ? 11 : 12};
}

// Rows of a forward pass do not depend on each other: pieces that keep all multiprocessors busy and
// read C seldom enough.
constexpr Jobs kRowJobs{8, 9};
constexpr int kKeyRowsPieceLog2 = 9;

// Key sums of one sequence at most; 0 where packed (TiledCall::key_pieces).
std::int64_t key_pieces_of(const Problem& p, const Jobs& jobs) {
  if (p.packed) return 0;
  return p.masked ? jobs.most_of_one(p.tokens_k) : jobs.count(p.tokens_k);
}

// Key jobs, per head; with jobs of rows the same without masks.
std::int64_t key_job_limit(const Problem& p, const Jobs& jobs) {
  return p.packed ? jobs.most(p.tokens_k, p.sequences) : p.sequences * key_pieces_of(p, jobs);
}
std::int64_t row_job_limit(const Problem& p, const Jobs& jobs) {
  return p.packed ? jobs.most(p.tokens, p.sequences) : p.sequences * jobs.count(p.tokens);
}

// Scratch memory, in the order in which it is used.
class Layout {
 public:
  explicit Layout(std::byte* base) : base_(base) {}
  template <class T>
  T* take(std::int64_t count) {
    T* const at = reinterpret_cast<T*>(base_ + bytes_);
    bytes_ += (static_cast<std::size_t>(count) * sizeof(T) + 255) / 256 * 256;
    return at;
  }
  std::size_t bytes() const { return bytes_; }

 private:
  std::byte* base_;
  std::size_t bytes_ = 0;
};

StateView own_state(Layout& layout, const Problem& p) {
  const std::int64_t heads = p.sequences * p.heads_k;
  StateView state;
  state.c = layout.take<float>(heads * p.dim);
  state.c_head = p.dim;
  state.c_sequence = p.heads_k * p.dim;
  state.values = layout.take<float>(heads * p.dim * p.dim_v);
  state.row = p.dim_v;
  state.head = p.dim * p.dim_v;
  state.sequence = p.heads_k * state.head;
  return state;
}

StateView given_state(const AttentionSaved& saved) {
  StateView state;
  state.c = static_cast<float*>(saved.key_lse.data);
  state.c_sequence = saved.key_lse.stride[0];
  state.c_head = saved.key_lse.stride[1];
  state.values = static_cast<float*>(saved.channel_values.data);
  state.sequence = saved.channel_values.stride[0];
  state.head = saved.channel_values.stride[1];
  state.row = saved.channel_values.stride[2];
  return state;
}

Partials partials(Layout& layout, const Problem& p, std::int64_t slots, bool exponents) {
  Partials sums;
  if (exponents) sums.m = layout.take<float>(slots * p.dim);
  sums.s = layout.take<float>(slots * p.dim);
  sums.values = layout.take<float>(slots * p.dim * p.dim_v);
  return sums;
}

struct Scratch {
  void* table = nullptr;
  StateView state, grads;
  Partials keys, rows;
  std::size_t bytes = 0;
};

Scratch lay_out(const Problem& p, std::byte* base) {
  Layout layout(base);
  Scratch scratch;
  scratch.table = layout.take<std::byte>(static_cast<std::int64_t>(table_bytes(p)));
  const Jobs jobs = sum_jobs(p);
  scratch.state = own_state(layout, p);
  if (key_pieces_of(p, jobs) != 1) {
    scratch.keys = partials(layout, p, key_job_limit(p, jobs) * p.heads_k, true);
  }
  if (p.op == Op::backward) {
    scratch.grads = own_state(layout, p);
    scratch.rows = partials(layout, p, row_job_limit(p, jobs) * p.heads, false);
  }
  scratch.bytes = layout.bytes();
  return scratch;
}

std::string refusal(const Problem& p) {
  if (p.device.kind != DeviceKind::cuda) return "is for tensors on CUDA devices";
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) return "takes bf16 and f16 alone";
  if (p.kind != Kind::lln) return "takes kind lln alone";
  if (p.causal) return "is not for causal attention";
  if (p.feature != Feature::exp) return "takes the feature map exp alone";
  if (p.dim % 8 != 0 || p.dim_v % 8 != 0) return "needs dim and dim_v in multiples of 8";
  const std::int64_t largest = p.op == Op::backward ? kTiledBackwardWidth : kTiledWidths[3];
  if (std::max(p.dim, p.dim_v) > largest) {
    return "takes dim and dim_v up to " + std::to_string(largest);
  }
  return device_refusal(p.device.index);
}

bool aligned(const ConstView& view) {
  return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && view.stride[0] % 8 == 0 &&
         view.stride[1] % 8 == 0 && view.stride[2] % 8 == 0;
}

bool aligned_state(const AttentionSaved& saved) {
  const View& values = saved.channel_values;
  return reinterpret_cast<std::uintptr_t>(values.data) % 16 == 0 && values.stride[0] % 4 == 0 &&
         values.stride[1] % 4 == 0 && values.stride[2] % 4 == 0;
}

bool takes(const Call& call) {
  const AttentionGradients& grads = call.grads;
  for (const ConstView& view : {call.in.q, call.in.k, call.in.v, ConstView(call.out.o), grads.g,
                                ConstView(grads.dq), ConstView(grads.dk), ConstView(grads.dv)}) {
    if (!aligned(view)) return false;
  }
  if (!aligned_state(call.out.saved) || !aligned_state(grads.saved)) return false;
  for (const View& view :
       {grads.dalpha, grads.dbeta, grads.dmix, grads.dlln_weight, grads.ddiag_weight}) {
    if (view.given()) return false;
  }
  return true;
}

const Kernel& plain(Op op) {
  static const std::vector<Kernel> forward = plain_forward_kernels();
  static const std::vector<Kernel> backward = plain_backward_kernels();
  return op == Op::forward ? forward.front() : backward.front();
}

std::size_t bytes(const Problem& p, int workers) {
  return std::max(lay_out(p, nullptr).bytes, plain(p.op).workspace_bytes(p, workers));
}

void run(const Call& call) {
  const Problem& p = call.problem;
  if (!takes(call)) return plain(p.op).run(call);
  const Scratch scratch = lay_out(p, call.workspace);
  const bool backward = p.op == Op::backward;
  const Jobs jobs = sum_jobs(p);
  TiledCall tiled;
  tiled.call = make_device_call(call);
  prepare_sequences(call, backward ? jobs : kRowJobs, jobs, scratch.table, tiled.call);
  if (p.kind == Kind::lln) tiled.call.lln_weight = {.constant = 1};
  const AttentionSaved& saved = backward ? call.grads.saved : call.out.saved;
  tiled.state = saved.key_lse.given() ? given_state(saved) : scratch.state;
  tiled.grads = scratch.grads;
  tiled.keys = scratch.keys;
  tiled.rows = scratch.rows;
  TiledPlan plan;
  plan.width = width_of(p);
  tiled.key_pieces = static_cast<std::uint32_t>(key_pieces_of(p, jobs));
  plan.whole = tiled.key_pieces == 1;
  plan.state_given = backward && saved.key_lse.given();
  plan.key_jobs = key_job_limit(p, jobs);
  plan.row_jobs = tiled.call.sequences.q_job_limit;
  if (p.packed) {
    plan.key_rows_jobs = tiled.call.sequences.k_job_limit;
  } else {
    tiled.key_rows_piece_log2 = kKeyRowsPieceLog2;
    plan.key_rows_jobs = p.batch * (((p.tokens_k - 1) >> kKeyRowsPieceLog2) + 1);
  }
  plan.stream = static_cast<cudaStream_t>(call.stream);
  const TiledLaunches& launches = p.dtype == DType::bf16 ? kTiledBf16 : kTiledF16;
  (backward ? launches.backward : launches.forward)(tiled, plan);
}

}  // namespace

std::vector<Kernel> tiled_forward_kernels() { return {{"cuda-tiled", refusal, bytes, run}}; }
std::vector<Kernel> tiled_backward_kernels() { return {{"cuda-tiled", refusal, bytes, run}}; }

}  // namespace lln::cuda
