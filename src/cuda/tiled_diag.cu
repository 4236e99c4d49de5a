// The tiled family of Diag and LLN+Diag on the host: which calls it takes and what is launched. Up
// to 128 channels LLN+Diag has kernels for both parts; beyond them the LLN part is that of tiled.h,
// and Diag is added to its results in place. Calls of unaligned tensors, which the problem does not
// show, go to the plain family.
// SPDX-License-Identifier: Apache-2.0
#include "cuda/tiled_diag.h"

#include <algorithm>

#include "cuda/parameter_gradients.h"
#include "cuda/tiled_diag_launch.h"
#include "cuda/tiled_plan.h"

namespace lln::cuda {
namespace {

constexpr std::int64_t kMostBlock = 1 << 24;  // tokens near a block are counted in 32 bits

// A block that is longer than the sequence is the sequence; a multiple of a tile needs no masks.
std::int64_t block_of(const Problem& p) {
  return std::min(p.diag_block, (p.tokens_k / 64 + 1) * 64);
}

// LLN+Diag in kernels of each part.
bool two_parts(const Problem& p) { return p.has_lln() && tiled_width(p) > 128; }

std::string part_refusal(const Problem& p) {
  if (std::max(p.dim, p.dim_v) > kTiledWidths[3]) {
    return "takes dim and dim_v up to " + std::to_string(kTiledWidths[3]);
  }
  // The widest ones have one stage of tiles, where others have two.
  constexpr int kStagesBytes = 200 * 1024, kStageBytes = 150 * 1024;
  const int needed = tiled_width(p) > 128 ? kStageBytes : kStagesBytes;
  if (p.op == Op::backward && tiled_width(p) > 64 && lacks_shared_memory(p, needed)) {
    return "takes gradients of dim and dim_v above " + std::to_string(tiled_width(p) / 2) +
           " where a block has " + std::to_string(needed) + " bytes of shared memory";
  }
  if (block_of(p) > kMostBlock) return "takes blocks up to " + std::to_string(kMostBlock);
  return "";
}

std::string refusal(const Problem& p) {
  if (!p.has_diag()) return "takes kinds diag and lln+diag alone";
  if (p.causal && p.has_lln()) return "takes no causal lln+diag";
  if (two_parts(p) && lacks_shared_memory(p, kWideLlnBytes)) {
    return "takes lln+diag of dim and dim_v above 128 where a block has " +
           std::to_string(kWideLlnBytes) + " bytes of shared memory";
  }
  if (const std::string why = part_refusal(p); !why.empty()) return why;
  if (p.dtype != DType::bf16 && p.dtype != DType::f16) return "takes bf16 and f16 alone";
  Problem either = p;
  either.causal = false;  // a mask inside the tiles
  return tiled_refusal(either);
}

void launch_diag(const Problem& p, const TiledWork& work) {
  const TiledDiagLaunches& launches = p.dtype == DType::bf16 ? kTiledDiagBf16 : kTiledDiagF16;
  (p.op == Op::backward ? launches.backward : launches.forward)(work.tiled, work.plan);
}

void run(const Call& call) {
  const Problem& p = call.problem;
  if (parameters_apart(call)) return run_with_parameters(call, run);
  if (!tiled_takes(call)) return run_plain(call);
  TiledWork work = prepare_tiled(call);
  work.tiled.call.diag_block = block_of(p);
  const TiledLaunches& lln = p.dtype == DType::bf16 ? kTiledBf16 : kTiledF16;
  if (two_parts(p)) {
    (p.op == Op::backward ? lln.backward : lln.forward)(work.tiled, work.plan);
    work.tiled.adds = true;
  } else if (p.has_lln() && !work.plan.state_given) {
    lln.state(work.tiled, work.plan);
  }
  launch_diag(p, work);
}

TiledWork prepare_part(const Call& call) {
  TiledWork work = prepare_diag_part(call);
  work.tiled.call.diag_block = block_of(call.problem);
  return work;
}

}  // namespace

const DiagPart kTiledDiagPart = {part_refusal, prepare_part, launch_diag};

std::vector<Kernel> tiled_diag_forward_kernels() {
  return {{"cuda-tiled-diag", refusal, tiled_bytes, run, DeviceKind::cuda, /*takes_pieces=*/false,
           tiled_call_bytes}};
}

std::vector<Kernel> tiled_diag_backward_kernels() {
  return {{"cuda-tiled-diag", refusal, tiled_bytes, run, DeviceKind::cuda, /*takes_pieces=*/false,
           tiled_call_bytes}};
}

}  // namespace lln::cuda
