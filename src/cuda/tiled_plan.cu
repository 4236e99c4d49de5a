// Jobs and scratch memory of the tiled families.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/tiled_plan.h"

#include <algorithm>

#include "cuda/device.h"
#include "cuda/parameter_gradients.h"
#include "cuda/plain.h"

namespace lln::cuda {
namespace {

// Rows whose results do not depend on how they are cut into pieces: the longest pieces that still
// give every multiprocessor its blocks, because a block begins by reading the state of its head.
int longest_piece_log2(const Problem& p, std::int64_t rows, int blocks_each) {
  const std::int64_t blocks = std::int64_t{multiprocessors(p.device.index)} * blocks_each * 9 / 10;
  int log2 = 6;
  while (log2 < 13 && (rows >> (log2 + 1)) >= blocks) ++log2;
  return log2;
}

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

struct TiledScratch {
  void* table = nullptr;
  StateView state, grads;
  Partials keys, rows;
  float *diag_mass = nullptr, *diag_delta = nullptr;
  std::size_t bytes = 0;
};

// own_states: the call is not given memory for the state of its keys.
TiledScratch lay_out(const Problem& p, bool own_states, std::byte* base) {
  Layout layout(base);
  TiledScratch scratch;
  scratch.table = layout.take<std::byte>(static_cast<std::int64_t>(table_bytes(p)));
  if (p.has_lln()) {
    const Jobs jobs = key_jobs(p), row_jobs = row_sum_jobs(p);
    const bool backward = p.op == Op::backward;
    if (own_states) scratch.state = own_state(layout, p);
    if (backward) scratch.grads = own_state(layout, p);
    // The sums of keys are joined before those of rows begin: their memory serves both.
    Layout with_keys = layout, with_rows = layout;
    const bool sums_keys = own_states || !backward;
    if (sums_keys && key_pieces_of(p, jobs) != 1) {
      scratch.keys = take_partials(with_keys, p, key_job_limit(p, jobs) * p.heads_k, true);
    }
    if (backward) {
      // The sums of the only piece are those of the sequence.
      const bool whole = !p.packed && row_jobs.count(p.tokens) == 1 && p.heads == p.heads_k;
      scratch.rows = whole ? Partials{nullptr, scratch.grads.c, scratch.grads.values}
                           : take_partials(with_rows, p, row_job_limit(p, row_jobs) * p.heads);
    }
    layout = with_keys.bytes() > with_rows.bytes() ? with_keys : with_rows;
  }
  // f32 has no pass over keys apart from that over rows.
  if (p.has_diag() && p.op == Op::backward && p.dtype != DType::f32) {
    scratch.diag_mass = layout.take<float>(p.heads * p.batch * p.tokens);
    scratch.diag_delta = layout.take<float>(p.heads * p.batch * p.tokens);
  }
  scratch.bytes = layout.bytes();
  return scratch;
}

// Without the scratch memory of an LLN part.
Problem diag_alone(Problem p) {
  p.kind = Kind::diag;
  return p;
}

// Where the caller keeps the state of the keys, if anywhere.
const AttentionSaved& state_of(const Call& call) {
  return call.problem.op == Op::backward ? call.grads.saved : call.out.saved;
}

bool aligned_state(const AttentionSaved& saved) {
  const View& values = saved.channel_values;
  return reinterpret_cast<std::uintptr_t>(values.data) % 16 == 0 && values.stride[0] % 4 == 0 &&
         values.stride[1] % 4 == 0 && values.stride[2] % 4 == 0;
}

}  // namespace

Partials take_partials(Layout& layout, const Problem& p, std::int64_t slots, bool exponents) {
  Partials sums;
  if (exponents) sums.m = layout.take<float>(slots * p.dim);
  sums.s = layout.take<float>(slots * p.dim);
  sums.values = layout.take<float>(slots * p.dim * p.dim_v);
  return sums;
}

StateView state_view(const AttentionSaved& saved) {
  return state_view(AttentionState{saved.key_lse, saved.channel_values});
}

StateView state_view(const AttentionState& given) {
  StateView state;
  state.c = static_cast<float*>(const_cast<void*>(given.key_lse.data));
  state.c_sequence = given.key_lse.stride[0];
  state.c_head = given.key_lse.stride[1];
  state.values = static_cast<float*>(const_cast<void*>(given.channel_values.data));
  state.sequence = given.channel_values.stride[0];
  state.head = given.channel_values.stride[1];
  state.row = given.channel_values.stride[2];
  return state;
}

int tiled_width(const Problem& p) {
  for (const std::int64_t width : kTiledWidths) {
    if (std::max(p.dim, p.dim_v) <= width) return static_cast<int>(width);
  }
  return 0;
}

Jobs key_jobs(const Problem& p) {
  // Partial sums take dim * dim_v numbers a piece: wider heads have longer pieces, so that the sums
  // stay a small part of the traffic.
  if (tiled_width(p) > 128) return {10, 12};
  if (tiled_width(p) > 64) return {10, 11, 11};
  return {10, 10};
}

Jobs row_sum_jobs(const Problem& p) {
  // Their blocks compute more: more of them, so that a few long heads fill the device.
  constexpr int kLongest = 11;
  return {10, tiled_width(p) <= 64 ? 10 : 11, kLongest};
}

std::string tiled_refusal(const Problem& p) {
  if (p.device.kind != DeviceKind::cuda) return "is for tensors on CUDA devices";
  if (p.causal) return "is not for causal attention";
  if (p.has_lln() && p.feature != Feature::exp) return "takes the feature map exp alone";
  if (p.dim % 8 != 0 || p.dim_v % 8 != 0) return "needs dim and dim_v in multiples of 8";
  return device_refusal(p.device.index);
}

bool lacks_shared_memory(const Problem& p, int bytes) {
  return p.device.kind == DeviceKind::cuda && device_refusal(p.device.index).empty() &&
         shared_memory(p.device.index) < bytes;
}

bool has_whole_pieces(const ConstView& view) {
  return reinterpret_cast<std::uintptr_t>(view.data) % 16 == 0 && view.stride[0] % 8 == 0 &&
         view.stride[1] % 8 == 0 && view.stride[2] % 8 == 0;
}

bool tiled_takes(const Call& call) {
  const AttentionGradients& grads = call.grads;
  for (const ConstView& view : {call.in.q, call.in.k, call.in.v, ConstView(call.out.o), grads.g,
                                ConstView(grads.dq), ConstView(grads.dk), ConstView(grads.dv)}) {
    if (!has_whole_pieces(view)) return false;
  }
  if (!aligned_state(call.out.saved) || !aligned_state(grads.saved)) return false;
  for (const View& view :
       {grads.dalpha, grads.dbeta, grads.dmix, grads.dlln_weight, grads.ddiag_weight}) {
    if (view.given()) return false;
  }
  return true;
}

const Kernel& plain_kernel(Op op) {
  static const std::vector<Kernel> forward = plain_forward_kernels();
  static const std::vector<Kernel> backward = plain_backward_kernels();
  return op == Op::forward ? forward.front() : backward.front();
}

Call without_padding(const Call& call) {
  Call rest = call;
  const std::int64_t padding = call.padding;
  rest.padding = 0;
  rest.problem.dim -= padding;
  AttentionInputs& in = rest.in;
  AttentionGradients& grads = rest.grads;
  for (ConstView* view : {&in.q, &in.k, &in.state.key_lse, &grads.dsaved.key_lse}) {
    view->shape[3] -= view->given() ? padding : 0;
  }
  for (ConstView* view : {&in.state.channel_values, &grads.dsaved.channel_values}) {
    view->shape[2] -= view->given() ? padding : 0;
  }
  for (View* view : {&grads.dq, &grads.dk}) view->shape[3] -= view->given() ? padding : 0;
  for (AttentionSaved* state : {&rest.out.saved, &grads.saved, &grads.dstate}) {
    state->key_lse.shape[3] -= state->key_lse.given() ? padding : 0;
    state->channel_values.shape[2] -= state->channel_values.given() ? padding : 0;
  }
  return rest;
}

void run_plain(const Call& call) { plain_kernel(call.problem.op).run(without_padding(call)); }

std::size_t tiled_bytes(const Problem& p, int workers) {
  const std::size_t own = lay_out(p, true, nullptr).bytes;
  return std::max(bytes_with_parameters(p, own, workers),
                  plain_kernel(p.op).workspace_bytes(p, workers));
}

std::size_t tiled_call_bytes(const Call& call, int workers) {
  const Problem& p = call.problem;
  const std::size_t own = lay_out(p, !state_of(call).key_lse.given(), nullptr).bytes;
  if (tiled_takes(call)) return own;
  if (parameters_apart(call)) return bytes_with_parameters(call, own, workers);
  return plain_kernel(p.op).workspace_bytes(p, workers);
}

TiledWork prepare_tiled(const Call& call, int row_piece_log2) {
  const Problem& p = call.problem;
  const AttentionSaved& saved = state_of(call);
  const TiledScratch scratch = lay_out(p, !saved.key_lse.given(), call.workspace);
  const bool backward = p.op == Op::backward;
  const Jobs jobs = key_jobs(p);
  TiledWork work;
  TiledCall& tiled = work.tiled;
  tiled.call = make_device_call(call);
  const int blocks_each = tiled_width(p) <= 64 ? 4 : 2;  // of the kernels, on a multiprocessor
  const auto piece_log2 = [&](std::int64_t rows, int blocks) {
    return row_piece_log2 != 0 ? row_piece_log2 : longest_piece_log2(p, rows, blocks);
  };
  const Jobs row_jobs{.every_log2 = piece_log2(p.batch * p.heads * p.tokens, blocks_each)};
  prepare_sequences(call, backward ? row_sum_jobs(p) : row_jobs, jobs, scratch.table, tiled.call);
  if (p.kind == Kind::lln) tiled.call.lln_weight = {.constant = 1};
  if (p.kind == Kind::diag) tiled.call.diag_weight = {.constant = 1};
  tiled.state = saved.key_lse.given() ? state_view(saved) : scratch.state;
  tiled.grads = scratch.grads;
  tiled.given = state_view(call.in.state);
  tiled.dsaved = state_view(call.grads.dsaved);
  tiled.dstate = state_view(call.grads.dstate);
  tiled.keys = scratch.keys;
  tiled.rows = scratch.rows;
  tiled.diag_mass = scratch.diag_mass;
  tiled.diag_delta = scratch.diag_delta;
  tiled.diag_rows = p.batch * p.tokens;
  tiled.causal = p.causal;
  tiled.key_pieces = static_cast<std::uint32_t>(key_pieces_of(p, jobs));
  TiledPlan& plan = work.plan;
  plan.width = tiled_width(p);
  plan.whole = tiled.key_pieces == 1;
  plan.state_given = backward && saved.key_lse.given();
  // Without pieces a state that nothing enters is still to be written, and gradients that are 0.
  plan.has_keys = p.tokens_k > 0 || !call.in.state.given();
  plan.has_rows = p.tokens > 0 || (backward && !call.grads.dsaved.given());
  plan.key_jobs = key_job_limit(p, jobs);
  plan.row_jobs = tiled.call.sequences.q_job_limit;
  if (p.packed) {
    plan.key_rows_jobs = tiled.call.sequences.k_job_limit;
  } else {
    tiled.key_rows_piece_log2 =
        piece_log2(p.batch * p.heads_k * p.tokens_k, tiled_width(p) <= 64 ? 16 : 1);
    plan.key_rows_jobs = p.batch * (((p.tokens_k - 1) >> tiled.key_rows_piece_log2) + 1);
  }
  plan.stream = static_cast<cudaStream_t>(call.stream);
  return work;
}

std::size_t diag_part_bytes(const Problem& p) {
  return lay_out(diag_alone(p), true, nullptr).bytes;
}

TiledWork prepare_diag_part(const Call& call) {
  Call alone = call;
  alone.problem = diag_alone(call.problem);
  TiledWork work = prepare_tiled(alone);
  work.tiled.call.diag_weight = make_device_call(call).diag_weight;
  work.tiled.adds = true;
  return work;
}

}  // namespace lln::cuda
