// c10d's collectives, with a name to every failure.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/parallel/rank_group.h"

#include <ATen/ops/empty.h>

namespace lln_torch {

template <class Call>
auto RankGroup::named(const Call& call) const {
  try {
    return call();
  } catch (const std::exception& e) {
    throw RankLost(watch_ != nullptr ? watch_->find_fault(text_of(e)) : text_of(e));
  }
}

RankGroup::Work RankGroup::begin_reduce(const at::Tensor& tensor,
                                        c10d::ReduceOp::RedOpType op) const {
  std::vector<at::Tensor> tensors = {tensor};
  c10d::AllreduceOptions options;
  options.reduceOp = op;
  return named([&] { return backend_of(tensor)->allreduce(tensors, options); });
}

RankGroup::Work RankGroup::begin_sum(const at::Tensor& tensor) const {
  return begin_reduce(tensor, c10d::ReduceOp::SUM);
}
RankGroup::Work RankGroup::begin_max(const at::Tensor& tensor) const {
  return begin_reduce(tensor, c10d::ReduceOp::MAX);
}
RankGroup::Work RankGroup::begin_min(const at::Tensor& tensor) const {
  return begin_reduce(tensor, c10d::ReduceOp::MIN);
}

RankGroup::Passed RankGroup::begin_pass(const at::Tensor& out, int to, const at::Tensor& in,
                                        int from, int tag) const {
  if (to < 0 && from < 0) return {};
  std::vector<at::Tensor> outs = {out}, ins = {in};
  // NCCL would otherwise wait for the one before it begins the other.
  const Backend& backend = backend_of(to >= 0 ? out : in);
  const bool together = backend->supportsCoalescing();
  return named([&] {
    Passed passed;
    if (together) backend->startCoalescing();
    if (from >= 0) passed.received = backend->recv(ins, from, tag);
    if (to >= 0) passed.sent = backend->send(outs, to, tag);
    if (together) passed = {nullptr, backend->endCoalescing()};
    return passed;
  });
}

void RankGroup::wait(const Work& work) const {
  set_waiting(true);
  named([&] { return work->wait(); });
  set_waiting(false);
}

void RankGroup::wait(const Passed& passed) const {
  if (passed.received) wait(passed.received);
  if (passed.sent) wait(passed.sent);
}

void RankGroup::broadcast(const at::Tensor& tensor, int root) const {
  std::vector<at::Tensor> tensors = {tensor};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  // The first exchange over NCCL waits for the others before there is anything to wait for.
  set_waiting(true);
  wait(named([&] { return backend_of(tensor)->broadcast(tensors, options); }));
}

at::Tensor RankGroup::gather(const at::Tensor& tensor) const {
  std::vector<std::int64_t> sizes = tensor.sizes().vec();
  sizes.insert(sizes.begin(), size());
  const at::Tensor all = at::empty(sizes, tensor.options());
  std::vector<std::vector<at::Tensor>> outputs = {all.unbind(0)};
  std::vector<at::Tensor> inputs = {tensor.contiguous()};
  wait(named([&] { return backend_of(tensor)->allgather(outputs, inputs); }));
  return all;
}

}  // namespace lln_torch
