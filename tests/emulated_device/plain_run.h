// The plain kernels of src/cuda on the host: a block is a loop over its threads, a launch a loop
// over its blocks. The bodies, their order and their workspace are those of the device; what they
// are given (DeviceCall) is made here from the checked call.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <vector>

#include "api/validate.h"
#include "attention_run.h"
#include "cuda/plain_plan.cuh"

namespace lln::test {

// Phases run thread by thread: from the first to the last, or (kReverse) the other way. A phase in
// which one thread reads what another writes gives different results then.
template <bool kReverse>
struct HostBlock {
  std::vector<float>& memory;

  float* shared() const { return memory.data(); }
  template <class Phase>
  void run(Phase phase) const {
    for (int t = 0; t < cuda::plain::kThreads; ++t) {
      phase(kReverse ? cuda::plain::kThreads - 1 - t : t);
    }
  }
};

// Shared memory starts as NaN in every block, and blocks too run in both orders.
template <bool kReverse>
struct HostLaunch {
  template <class Body>
  void operator()(const Body& body, std::int64_t blocks, int shared) const {
    EXPECT_EQ(shared % 8, 0);
    EXPECT_LE(shared, cuda::plain::kSharedBytes) << Body::kName;
    for (std::int64_t i = 0; i < blocks; ++i) {
      std::vector<float> memory(static_cast<std::size_t>(shared) / sizeof(float),
                                std::numeric_limits<float>::quiet_NaN());
      HostBlock<kReverse> block{memory};
      body(block, kReverse ? blocks - 1 - i : i);
    }
  }
};

inline cuda::Rows device_rows(const ConstView& view) {
  return {const_cast<void*>(view.data), view.stride[0], view.stride[1], view.stride[2]};
}

inline cuda::Weight device_weight(const Call& call, const ConstView& own, bool is_diag) {
  const ConstView& view = own.given() ? own : call.in.mix;
  return {static_cast<const float*>(view.data),
          view.stride[0],
          view.stride[1],
          view.stride[2],
          view.stride[3],
          call.options.mix,
          is_diag && !own.given()};
}

// What the device finds of the sequences of a call.
struct DeviceTable {
  std::vector<cuda::DeviceSequence> sequences;
  std::vector<std::int32_t> q_jobs, k_jobs;  // packed: the sequence of every job, then some of none
};

inline cuda::DeviceCall device_call(const Call& call, const DeviceTable& table) {
  const Problem& p = call.problem;
  cuda::DeviceCall device{};
  device.dtype = p.dtype;
  device.heads = p.heads;
  device.heads_k = p.heads_k;
  device.dim = p.dim;
  device.dim_v = p.dim_v;
  device.kind = p.kind;
  device.diag_block = p.diag_block;
  device.feature = p.feature;
  device.power = p.power;
  device.q = device_rows(call.in.q);
  device.k = device_rows(call.in.k);
  device.v = device_rows(call.in.v);
  device.o = device_rows(call.out.o);
  device.g = device_rows(call.grads.g);
  device.dq = device_rows(call.grads.dq);
  device.dk = device_rows(call.grads.dk);
  device.dv = device_rows(call.grads.dv);
  device.alpha = {static_cast<const float*>(call.in.alpha.data), call.in.alpha.stride[0],
                  call.in.alpha.stride[1]};
  device.beta = {static_cast<const float*>(call.in.beta.data), call.in.beta.stride[0],
                 call.in.beta.stride[1]};
  device.lln_weight = device_weight(call, call.in.lln_weight, false);
  device.diag_weight = device_weight(call, call.in.diag_weight, true);
  cuda::Sequences& all = device.sequences;
  all.table = p.packed || p.masked || p.block_origins ? table.sequences.data() : nullptr;
  all.q_job_sequence = p.packed ? table.q_jobs.data() : nullptr;
  all.k_job_sequence = p.packed ? table.k_jobs.data() : nullptr;
  all.count = p.sequences;
  all.tokens = p.tokens;
  all.tokens_k = p.tokens_k;
  all.q_jobs = all.k_jobs = cuda::plain::kJobs;
  all.mask = call.in.key_mask.data;
  all.mask_batch = call.in.key_mask.stride[0];
  all.mask_token = call.in.key_mask.stride[1];
  return device;
}

inline DeviceTable device_table(const CheckedCall& checked) {
  const Problem& p = checked.call.problem;
  const cuda::Jobs& jobs = cuda::plain::kJobs;
  DeviceTable table;
  for (const Sequence& s : checked.sequences) {
    const auto number = static_cast<std::int32_t>(table.sequences.size());
    // Without packing nobody looks at the jobs.
    const auto first = [&](const std::vector<std::int32_t>& before) {
      return p.packed ? static_cast<std::int64_t>(before.size()) : -1;
    };
    table.sequences.push_back({s.batch, s.q_begin, s.q_tokens, s.k_begin, s.k_tokens, s.key_first,
                               s.key_end, first(table.q_jobs), first(table.k_jobs),
                               s.block_origin});
    table.q_jobs.resize(table.q_jobs.size() + static_cast<std::size_t>(jobs.count(s.q_tokens)),
                        number);
    table.k_jobs.resize(table.k_jobs.size() + static_cast<std::size_t>(jobs.count(s.k_tokens)),
                        number);
  }
  table.q_jobs.resize(static_cast<std::size_t>(jobs.most(p.tokens, p.sequences)), -1);
  table.k_jobs.resize(static_cast<std::size_t>(jobs.most(p.tokens_k, p.sequences)), -1);
  return table;
}

// Runs the kernels on a checked call; the workspace is NaN everywhere.
inline void run_plain_kernels(CheckedCall& checked, bool reverse, const DeviceTable& table) {
  Call& call = checked.call;
  cuda::plain::Workspace needed(nullptr);
  cuda::plain::lay_out(call.problem, needed);
  std::vector<float> memory(needed.used() / sizeof(float) + 1,
                            std::numeric_limits<float>::quiet_NaN());
  cuda::plain::Workspace workspace(reinterpret_cast<std::byte*>(memory.data()));
  cuda::plain::PlainCall p = cuda::plain::make_plain_call(call, workspace);
  p.call = device_call(call, table);
  const auto launch = [&](auto&& with) {
    if (call.problem.op == Op::forward) {
      cuda::plain::launch_forward(p, with);
    } else {
      cuda::plain::launch_backward(p, with);
    }
  };
  if (reverse) {
    launch(HostLaunch<true>{});
  } else {
    launch(HostLaunch<false>{});
  }
}

struct PlainOptions {
  bool reverse = false;
  AttentionSaved saved = {};  // for the backward
};

inline CheckedCall check_case(const Case& c, const Inputs& in, TensorSet& outputs,
                              const AttentionSaved& saved = {}) {
  if (c.problem.op == Op::forward) {
    return check_forward(in.views(), conformance::forward_views(outputs), conformance::options(c));
  }
  AttentionGradients grads = conformance::backward_views(outputs, in);
  grads.saved = saved;
  return check_backward(in.views(), grads, conformance::options(c));
}

// As run() of attention_run.h.
inline TensorSet run_plain(const Case& c, const Inputs& in, const PlainOptions& options = {}) {
  TensorSet outputs = conformance::make_outputs(c, in, c.problem.dtype);
  CheckedCall checked = check_case(c, in, outputs, options.saved);
  checked.call.sequences = checked.sequences;
  run_plain_kernels(checked, options.reverse, device_table(checked));
  return outputs;
}

}  // namespace lln::test
