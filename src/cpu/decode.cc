// The decode kernels: a step or a read, and an append, which hands its long stretches to the causal
// forward and takes the rest token by token.
// SPDX-License-Identifier: Apache-2.0
#include "cpu/highway.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/decode.cc"
#include <hwy/foreach_target.h>
// foreach_target first
#include "cpu/decode-inl.h"
#include "cpu/decode_plan.h"
#include "cpu/kernel_run-inl.h"
#include "cpu/targets.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {

void causal_forward(const Call& call);

namespace {

class Step : KernelRun<StepLayout> {
 public:
  explicit Step(const Call& call) : KernelRun(call) {}

  void run() {
    const std::int64_t floats = key_heads() * decode_shape(p_).floats() * p_.tokens;
    parallel_for(floats >= kStepFloatsToShare ? call_.parallel : nullptr, key_heads(),
                 [&](std::int64_t pair, int worker) { run_head(pair, worker); });
  }

 private:
  void run_head(std::int64_t pair, int worker) {
    const KeyHead keys(call_, pair / p_.heads_k, pair % p_.heads_k);
    DecodeHead head(call_, dims_, keys, layout_.tiles[worker]);
    if (p_.tokens_k == 0) {
      head.read(p_.tokens);
    } else if (keys.sequence->k_tokens > 0) {
      head.add(0);
    } else {
      head.zero_rows({0, p_.tokens});
    }
  }
};

}  // namespace

void step(const Call& call) { Step(call).run(); }

void append(const Call& call) {
  std::vector<Sequence> sequences(call.sequences.begin(), call.sequences.end());
  for (std::size_t s = 0; s < sequences.size(); ++s) {
    Sequence& seq = sequences[s];
    seq.q_tokens = seq.key_end = seq.k_tokens;
    seq.key_first = single_tokens(call.problem, call.tokens_before[s], seq.k_tokens);
    seq.block_origin = seq.key_first;
  }
  Call walk = call;
  walk.problem = append_walk(call.problem);
  walk.sequences = sequences;
  causal_forward(walk);
}

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace lln::cpu {

LLN_CPU_EXPORT(step)
LLN_CPU_EXPORT(append)

std::size_t step_workspace(const Problem& problem, int workers) {
  return layout_bytes<StepLayout>(problem, workers);
}

std::size_t append_workspace(const Problem& problem, int workers) {
  return layout_bytes<CausalForwardLayout>(append_walk(problem), workers);
}

}  // namespace lln::cpu
#endif
