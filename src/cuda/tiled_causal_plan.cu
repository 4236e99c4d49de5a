// Which problems the causal walks take, and how their scratch memory is laid out.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/tiled_causal_plan.h"

#include <algorithm>
#include <bit>

#include "cuda/device.h"
#include "cuda/parameter_gradients.h"
#include "cuda/parts.h"
#include "cuda/plain.h"
#include "cuda/tiled_plan.h"

namespace lln::cuda {
namespace {

int width_of(const Problem& p) { return std::max(p.dim, p.dim_v) <= 64 ? 64 : 128; }

// Tiles of the wide kernels need the shared memory of the largest devices.
std::string memory_refusal(const Problem& p) {
  constexpr int kWideBytes = 200 * 1024, kNarrowBytes = 96 * 1024;
  const int found = shared_memory(p.device.index);
  const int needed = width_of(p) == 64 ? kNarrowBytes : kWideBytes;
  if (found >= needed) return "";
  return "needs " + std::to_string(needed) + " bytes of shared memory, the device has " +
         std::to_string(found);
}

std::int64_t flag_count(const Problem& p) { return 1 + p.sequences * p.heads_k; }

bool has_pieces(const Problem& p) { return p.tokens > std::int64_t{1} << kCausalPieceLog2; }

Partials partials(Layout& layout, const Problem& p, std::int64_t heads) {
  return take_partials(layout, p, ((p.batch * p.tokens >> kCausalPieceLog2) + 1) * heads);
}

// Pointers to scratch memory alone.
CausalWork lay_out(const Problem& p, Layout& layout) {
  CausalWork work;
  CausalCall& causal = work.causal;
  causal.flags = layout.take<std::uint32_t>(flag_count(p));
  work.table = reinterpret_cast<DeviceSequence*>(
      layout.take<std::byte>(static_cast<std::int64_t>(table_bytes(p))));
  if (has_pieces(p)) causal.before = partials(layout, p, p.heads_k);
  causal.rows = p.batch * p.tokens;
  if (p.op == Op::backward) {
    if (has_pieces(p)) causal.behind = partials(layout, p, p.heads);
    causal.inverse = layout.take<float>(p.heads * causal.rows);
    causal.delta = layout.take<float>(p.heads * causal.rows);
    if (p.has_diag() && p.dtype == DType::bf16) {  // others add Diag by its own kernels
      causal.diag_mass = layout.take<float>(p.heads * causal.rows);
      causal.diag_delta = layout.take<float>(p.heads * causal.rows);
      causal.diag_weight = layout.take<float>(p.heads * causal.rows);
    }
  }
  return work;
}

}  // namespace

std::string causal_refusal(const Problem& p, std::int64_t widest) {
  if (p.device.kind != DeviceKind::cuda) return "is for tensors on CUDA devices";
  if (!p.causal) return "is for causal attention";
  if (!p.has_lln()) return "takes kinds lln and lln+diag";
  if (p.feature != Feature::exp) return "takes the feature map exp alone";
  if (p.dim % 8 != 0 || p.dim_v % 8 != 0) return "needs dim and dim_v in multiples of 8";
  if (std::max(p.dim, p.dim_v) > widest) {
    return "takes dim and dim_v up to " + std::to_string(widest);
  }
  return device_refusal(p.device.index);
}

std::string tiled_causal_refusal(const Problem& p) {
  if (p.dtype != DType::bf16) return "takes bf16 alone";
  if (const std::string why = causal_refusal(p); !why.empty()) return why;
  if (p.kind == Kind::lln_diag &&
      (p.diag_block > kChunk || !std::has_single_bit(static_cast<std::uint64_t>(p.diag_block)))) {
    return "takes diagonal blocks of powers of two up to " + std::to_string(kChunk);
  }
  return memory_refusal(p);
}

std::string sm90_causal_refusal(const Problem& p) {
  if (p.device.kind != DeviceKind::cuda) return "is for tensors on CUDA devices";
  if (!has_sm90a_code(p.device.index)) {
    return "needs compute capability 9.0 and a build with code for sm_90a";
  }
  return tiled_causal_refusal(p);
}

std::size_t causal_flag_bytes(const Problem& p) {
  Layout layout(nullptr);
  layout.take<std::uint32_t>(flag_count(p));
  return layout.bytes();
}

std::size_t causal_scratch_bytes(const Problem& p) {
  Layout layout(nullptr);
  lay_out(p, layout);
  return layout.bytes();
}

std::size_t causal_bytes(const Problem& p, std::size_t walks, int workers) {
  return std::max(walks, causal_flag_bytes(p) + plain_kernel(p.op).workspace_bytes(p, workers));
}

CausalWork prepare_causal(const Call& call) {
  const Problem& p = call.problem;
  Layout layout(call.workspace);
  CausalWork work = lay_out(p, layout);
  CausalCall& causal = work.causal;
  CausalPlan& plan = work.plan;
  causal.call = make_device_call(call);
  plan.stream = static_cast<cudaStream_t>(call.stream);
  prepare_sequences(call, kCausalJobs, kCausalJobs, work.table, causal.call);
  check(cudaMemsetAsync(causal.flags, 0, static_cast<std::size_t>(flag_count(p)) * 4, plan.stream),
        "cudaMemsetAsync");
  if (p.op == Op::forward && call.out.saved.key_lse.given()) {
    causal.saved = state_view(call.out.saved);
  }
  if (p.kind == Kind::lln) causal.call.lln_weight = {.constant = 1};
  if (p.has_diag()) causal.diag_log2 = std::countr_zero(static_cast<std::uint64_t>(p.diag_block));
  plan.width = width_of(p);
  plan.pieces = has_pieces(p);
  plan.jobs = causal.call.sequences.q_job_limit;
  return work;
}

void run_plain_again(const Call& call, const CausalWork& work) {
  Call again = without_padding(call);
  again.workspace = call.workspace + causal_flag_bytes(call.problem);
  run_plain_heads(again, work.causal.flags);
}

bool by_channel(const ConstView& weight) { return weight.given() && weight.shape[3] > 1; }

std::size_t CausalCalls::bytes(const Problem& p, int workers) const {
  const std::size_t most = bytes_with_parameters(p, own_bytes(p, workers), workers);
  const bool parts = p.op == Op::backward && p.has_diag();
  return parts ? std::max(most, parts_bytes(p, workers)) : most;
}

std::size_t CausalCalls::call_bytes(const Call& call, int workers) const {
  if (!holds_weights(call)) return parts_call_bytes(call, workers);
  const std::size_t own = own_bytes(call.problem, workers);
  return parameters_apart(call) ? bytes_with_parameters(call, own, workers) : own;
}

bool CausalCalls::run_apart(const Call& call, void (*run)(const Call&)) const {
  if (!holds_weights(call)) {
    run_parts(call);
  } else if (parameters_apart(call)) {
    run_with_parameters(call, run);
  } else if (!tiled_takes(call)) {
    run_plain(call);
  } else {
    return false;
  }
  return true;
}

}  // namespace lln::cuda
