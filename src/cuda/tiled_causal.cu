// The causal tiled family on the host: which calls it takes and what is launched. Its kernels have
// no reference exponents: heads whose exponents are not moderate or whose results are not finite
// are flagged, and the plain kernels compute those again. Gradients with weights by channel are for
// two calls (parts.h).
// SPDX-License-Identifier: Apache-2.0
#include "cuda/tiled_causal.h"

#include "cuda/sm90/causal.h"
#include "cuda/tiled_causal_plan.h"
#include "cuda/tiled_plan.h"

namespace lln::cuda {
namespace {

// The backward walks have one weight for each row of a part.
bool holds_weights(const Call& call) {
  if (call.problem.op != Op::backward || !call.problem.has_diag()) return true;
  return !by_channel(call.in.mix) && !by_channel(call.in.lln_weight) &&
         !by_channel(call.in.diag_weight);
}

std::size_t own_bytes(const Problem& p, int workers) {
  return causal_bytes(p, causal_scratch_bytes(p), workers);
}

constexpr CausalCalls kCalls{holds_weights, own_bytes};

std::size_t bytes(const Problem& p, int workers) { return kCalls.bytes(p, workers); }
std::size_t call_bytes(const Call& call, int workers) { return kCalls.call_bytes(call, workers); }

template <CausalLaunch kForward, CausalLaunch kBackward>
void run(const Call& call) {
  const Problem& p = call.problem;
  if (kCalls.run_apart(call, run<kForward, kBackward>)) return;
  const CausalWork work = prepare_causal(call);
  (p.op == Op::forward ? kForward : kBackward)(work.causal, work.plan);
  run_plain_again(call, work);
}

// The same walks twice; those of compute capability 9.0 come first.
std::vector<Kernel> kernels() {
  return {{"cuda-sm90-causal", sm90_causal_refusal, bytes,
           run<sm90::launch_causal_forward, sm90::launch_causal_backward>, DeviceKind::cuda,
           /*takes_pieces=*/false, call_bytes},
          {"cuda-tiled-causal", tiled_causal_refusal, bytes,
           run<launch_causal_forward, launch_causal_backward>, DeviceKind::cuda,
           /*takes_pieces=*/false, call_bytes}};
}

}  // namespace

std::vector<Kernel> tiled_causal_forward_kernels() { return kernels(); }
std::vector<Kernel> tiled_causal_backward_kernels() { return kernels(); }

}  // namespace lln::cuda
