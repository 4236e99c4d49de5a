// What the kernels share: a call with its sizes and scratch memory, and tasks over the heads and
// segments of a wave.
// SPDX-License-Identifier: Apache-2.0
#if defined(LLN_CPU_KERNEL_RUN_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LLN_CPU_KERNEL_RUN_INL_H_
#undef LLN_CPU_KERNEL_RUN_INL_H_
#else
#define LLN_CPU_KERNEL_RUN_INL_H_
#endif

#include "cpu/head-inl.h"
#include "cpu/layout.h"
#include "cpu/state-inl.h"

HWY_BEFORE_NAMESPACE();
namespace lln::cpu {
namespace HWY_NAMESPACE {

template <class Layout>
class KernelRun {
 protected:
  explicit KernelRun(const Call& call)
      : call_(call),
        p_(call.problem),
        dims_(p_),
        arena_(call.workspace),
        layout_(arena_, p_, dims_, worker_count(call.parallel)) {}

  // Of all sequences.
  std::int64_t key_heads() const { return p_.sequences * p_.heads_k; }

  KeyHead key_head(const HeadWork& work) const { return {call_, work.sequence, work.head_k}; }

  // The whole call as one wave of causal heads.
  Wave causal_wave() const {
    std::int64_t next = 0;
    return take_wave(next, key_heads(), kUnlimited, kUnlimited, kUnlimited,
                     [&](std::int64_t pair) { return causal_work(call_, dims_, pair); });
  }

  // body(work, index of the head in the wave, worker) for every head.
  template <class Body>
  void for_heads(const Wave& wave, Body&& body) const {
    parallel_for(call_.parallel, static_cast<std::int64_t>(wave.heads.size()),
                 [&](std::int64_t h, int worker) { body(wave.heads[h], h, worker); });
  }

  // body(work, index of the head, segment, worker) for count(work) segments of every head.
  template <class Count, class Body>
  void for_segments(const Wave& wave, Count&& count, Body&& body) const {
    for_tasks(wave, segment_tasks(wave, count), body);
  }
  template <class Body>
  void for_tasks(const Wave& wave, const std::vector<SegmentTask>& tasks, Body&& body) const {
    parallel_for(call_.parallel, static_cast<std::int64_t>(tasks.size()),
                 [&](std::int64_t t, int worker) {
                   body(wave.heads[tasks[t].head], tasks[t].head, tasks[t].segment, worker);
                 });
  }
  template <class Body>
  void for_key_segments(const Wave& wave, Body&& body) const {
    for_segments(
        wave, [](const HeadWork& work) { return work.keys.count(); }, body);
  }
  template <class Body>
  void for_row_segments(const Wave& wave, Body&& body) const {
    for_segments(
        wave, [](const HeadWork& work) { return work.rows.count(); }, body);
  }

  const Call& call_;
  const Problem& p_;
  const Dims dims_;
  Arena arena_;
  Layout layout_;
};

}  // namespace HWY_NAMESPACE
}  // namespace lln::cpu
HWY_AFTER_NAMESPACE();

#endif
