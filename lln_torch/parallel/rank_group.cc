// c10d's collectives, with a name to every failure.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/parallel/rank_group.h"

namespace lln_torch {

RankGroup::Work RankGroup::begin_sum(const at::Tensor& tensor) const {
  std::vector<at::Tensor> tensors = {tensor};
  try {
    return backend_->allreduce(tensors);
  } catch (const std::exception& e) {
    throw RankLost(watch_->find_fault(text_of(e)));
  }
}

void RankGroup::wait(const Work& work) const {
  watch_->set_waiting(true);
  try {
    work->wait();
  } catch (const std::exception& e) {
    throw RankLost(watch_->find_fault(text_of(e)));
  }
  watch_->set_waiting(false);
}

void RankGroup::broadcast(const at::Tensor& tensor, int root) const {
  std::vector<at::Tensor> tensors = {tensor};
  c10d::BroadcastOptions options;
  options.rootRank = root;
  Work work;
  try {
    work = backend_->broadcast(tensors, options);
  } catch (const std::exception& e) {
    throw RankLost(watch_->find_fault(text_of(e)));
  }
  wait(work);
}

}  // namespace lln_torch
