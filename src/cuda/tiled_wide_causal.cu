// Causal LLN and LLN+Diag of heads with 129 to 256 channels in bf16: which calls the family takes
// and what is launched. Heads that are out of reach are those of tiled_causal_plan.h. Diag is added
// to the results of LLN in place: o, which LLN stores without its weight, and gradients are rounded
// twice.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/tiled_wide_causal.h"

#include <algorithm>

#include "cuda/launch.h"
#include "cuda/tiled_causal_plan.h"
#include "cuda/tiled_diag.h"
#include "cuda/tiled_plan.h"
#include "cuda/tiled_wide_causal_forward.cuh"
#include "cuda/tiled_wide_causal_join.cuh"
#include "cuda/tiled_wide_causal_keys.cuh"
#include "cuda/tiled_wide_causal_rows.cuh"
#include "cuda/tiled_wide_causal_sums.cuh"

namespace lln::cuda {
namespace {

constexpr std::int64_t kNarrow = 128;  // up to which there are other families

std::string refusal(const Problem& p) {
  if (p.dtype != DType::bf16) return "takes bf16 alone";
  if (std::max(p.dim, p.dim_v) <= kNarrow) {
    return "takes dim or dim_v above " + std::to_string(kNarrow);
  }
  if (const std::string why = causal_refusal(p, WideCausalShape::kDim); !why.empty()) return why;
  constexpr int kNeeded = sizeof(WideCausalShared);
  if (lacks_shared_memory(p, kNeeded)) {
    return "needs " + std::to_string(kNeeded) + " bytes of shared memory";
  }
  return p.has_diag() ? kTiledDiagPart.refusal(p) : "";
}

bool has_pieces(const Problem& p) { return p.tokens > std::int64_t{1} << kWideCausalPieceLog2; }

// Pointers to scratch memory alone; flags first, as causal_flag_bytes() has them.
WideCausalCall lay_out(const Problem& p, Layout& layout, void** table) {
  WideCausalCall wide;
  wide.causal.flags = reinterpret_cast<std::uint32_t*>(
      layout.take<std::byte>(static_cast<std::int64_t>(causal_flag_bytes(p))));
  *table = layout.take<std::byte>(static_cast<std::int64_t>(table_bytes(p)));
  if (has_pieces(p)) {
    const std::int64_t slots = ((p.batch * p.tokens >> kWideCausalPieceLog2) + 1) * p.heads_k;
    wide.causal.before = take_partials(layout, p, slots);
    wide.masses = layout.take<float>(slots * p.dim);
    wide.matrices = layout.take<Bf16>(slots * p.dim * p.dim_v);
  }
  wide.causal.rows = p.batch * p.tokens;
  if (p.op == Op::backward) {
    wide.causal.inverse = layout.take<float>(p.heads * wide.causal.rows);
    wide.causal.delta = layout.take<float>(p.heads * wide.causal.rows);
  } else {
    wide.last_masses = layout.take<float>(p.sequences * p.heads_k * p.dim);
  }
  return wide;
}

std::size_t scratch_bytes(const Problem& p) {
  Layout layout(nullptr);
  void* table = nullptr;
  lay_out(p, layout, &table);
  return layout.bytes();
}

// A gradient of o has one weight for each row.
bool holds_weights(const Call& call) {
  if (call.problem.op != Op::backward || !call.problem.has_diag()) return true;
  return !by_channel(call.in.mix) && !by_channel(call.in.lln_weight);
}

std::size_t own_bytes(const Problem& p, int workers) {
  const std::size_t diag = p.has_diag() ? diag_part_bytes(p) : 0;
  return causal_bytes(p, scratch_bytes(p) + diag, workers);
}

constexpr CausalCalls kCalls{holds_weights, own_bytes};

std::size_t bytes(const Problem& p, int workers) { return kCalls.bytes(p, workers); }
std::size_t call_bytes(const Call& call, int workers) { return kCalls.call_bytes(call, workers); }

CausalWork prepare(const Call& call, WideCausalCall& wide) {
  const Problem& p = call.problem;
  Layout layout(call.workspace);
  void* table = nullptr;
  wide = lay_out(p, layout, &table);
  CausalCall& causal = wide.causal;
  causal.call = make_device_call(call);
  CausalWork work;
  CausalPlan& plan = work.plan;
  plan.stream = static_cast<cudaStream_t>(call.stream);
  prepare_sequences(call, kWideCausalJobs, kWideCausalJobs, table, causal.call);
  check(cudaMemsetAsync(causal.flags, 0, causal_flag_bytes(p), plan.stream), "cudaMemsetAsync");
  if (p.op == Op::forward && call.out.saved.key_lse.given()) {
    causal.saved = state_view(call.out.saved);
  } else {
    wide.last_masses = nullptr;
  }
  if (p.kind == Kind::lln) causal.call.lln_weight = {.constant = 1};
  plan.pieces = has_pieces(p);
  plan.jobs = causal.call.sequences.q_job_limit;
  work.causal = causal;
  return work;
}

// Launches over blocks for 64 tokens of each head.
void launch_tiles(const char* name, void (*kernel)(WideCausalCall), const WideCausalCall& wide,
                  std::int64_t heads, const CausalPlan& plan) {
  launch(name, kernel,
         LaunchShape{plan.jobs * heads * kWideCausalTiles, WideCausalShape::kThreads,
                     sizeof(WideCausalShared), plan.stream},
         wide);
}

template <bool kRows>
void launch_sums(const WideCausalCall& wide, const CausalPlan& plan) {
  const DeviceCall& call = wide.causal.call;
  const int parts = wide_sum_parts(call.dim) * wide_sum_parts(call.dim_v);
  launch("wide_causal_sums", wide_causal_sums<kRows>,
         LaunchShape{plan.jobs * call.heads_k * parts, WideSumsShape::kThreads,
                     WideSumsShape::kShared, plan.stream},
         wide);
}

// Over all numbers of the states of all sequences.
void launch_elements(const char* name, void (*kernel)(WideCausalCall), const WideCausalCall& wide,
                     const CausalPlan& plan) {
  const DeviceCall& call = wide.causal.call;
  const std::int64_t each = blocks_for((call.dim * call.dim_v + call.dim) / 4, kWideJoinThreads);
  launch(name, kernel,
         LaunchShape{call.sequences.count * call.heads_k * each, kWideJoinThreads, 0, plan.stream},
         wide);
}

void launch_lln(const Problem& p, const WideCausalCall& wide, const CausalPlan& plan) {
  const bool saves = wide.last_masses != nullptr;
  if (plan.pieces || saves) launch_sums<false>(wide, plan);
  if (plan.pieces) launch_elements("wide_causal_join", wide_causal_join<false>, wide, plan);
  if (p.op == Op::forward) {
    if (saves) launch_elements("wide_causal_save", wide_causal_save, wide, plan);
    return launch_tiles("wide_causal_forward", wide_causal_forward, wide, p.heads, plan);
  }
  launch_tiles("wide_causal_rows", wide_causal_rows, wide, p.heads, plan);
  if (plan.pieces) {  // nobody needs the sums over keys any more
    launch_sums<true>(wide, plan);
    launch_elements("wide_causal_join", wide_causal_join<true>, wide, plan);
  }
  launch_tiles("wide_causal_values", wide_causal_values, wide, p.heads_k, plan);
  launch_tiles("wide_causal_keys", wide_causal_keys, wide, p.heads_k, plan);
}

void run(const Call& call) {
  const Problem& p = call.problem;
  if (kCalls.run_apart(call, run)) return;
  WideCausalCall wide;
  const CausalWork work = prepare(call, wide);
  if (p.has_diag()) {
    Call diag_call = call;
    diag_call.workspace = call.workspace + scratch_bytes(p);
    // Before the first kernel of LLN: those of Diag read their table of sequences early.
    TiledWork diag = kTiledDiagPart.prepare(diag_call);
    diag.tiled.call.lln_weight = wide.causal.call.lln_weight;
    launch_lln(p, wide, work.plan);
    kTiledDiagPart.launch(p, diag);
  } else {
    launch_lln(p, wide, work.plan);
  }
  run_plain_again(call, work);
}

std::vector<Kernel> kernels() {
  return {{"cuda-tiled-wide-causal", refusal, bytes, run, DeviceKind::cuda,
           /*takes_pieces=*/false, call_bytes}};
}

}  // namespace

std::vector<Kernel> tiled_wide_causal_forward_kernels() { return kernels(); }
std::vector<Kernel> tiled_wide_causal_backward_kernels() { return kernels(); }

}  // namespace lln::cuda
