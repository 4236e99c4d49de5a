// Exchange of tensors among the ranks of a group. A failed exchange becomes an error that names the
// rank at fault. A job may have several groups, as the rows and columns of a mesh.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Types.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <stdexcept>

#include "lln_torch/parallel/rank_watch.h"

namespace lln_torch {

// Another rank is gone, or the job was ended by one. The text says which.
class RankLost : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

class RankGroup {
 public:
  using Work = c10::intrusive_ptr<c10d::Work>;

  // The watch outlives this object. Without one a failed exchange is told in the words of c10d.
  // Tensors in host memory are exchanged by `host`, where the backend takes those of a device only.
  RankGroup(Backend backend, const c10::Device& device, RankWatch* watch = nullptr,
            Backend host = nullptr)
      : backend_(std::move(backend)),
        host_(host ? std::move(host) : backend_),
        device_(device),
        watch_(watch) {}

  int rank() const { return backend_->getRank(); }
  int size() const { return backend_->getSize(); }
  bool first() const { return rank() == 0; }
  const c10::Device& device() const { return device_; }
  // Something was done that others need not wait for: see RankWatch.
  void work_done() const {
    if (watch_ != nullptr) watch_->work_done();
  }
  // Around what waits for other ranks, besides the calls here.
  void set_waiting(bool waiting) const {
    if (watch_ != nullptr) watch_->set_waiting(waiting);
  }

  // Each begins an exchange of contiguous tensors, which may not be touched until wait(). All ranks
  // begin theirs in the same order.
  Work begin_sum(const at::Tensor& tensor) const;  // over all ranks, in place
  Work begin_max(const at::Tensor& tensor) const;
  Work begin_min(const at::Tensor& tensor) const;
  struct Passed {
    Work sent, received;
  };
  // To one rank and from another; -1: none. Passes that are under way at once have tags of their
  // own.
  Passed begin_pass(const at::Tensor& out, int to, const at::Tensor& in, int from, int tag) const;
  // For exchanges of host memory the host waits, for those on a device its stream does.
  void wait(const Work& work) const;
  void wait(const Passed& passed) const;

  // The tensor of rank `root` to all.
  void broadcast(const at::Tensor& tensor, int root) const;
  // Those of all ranks, [size, ...] in their order.
  at::Tensor gather(const at::Tensor& tensor) const;

 private:
  Work begin_reduce(const at::Tensor& tensor, c10d::ReduceOp::RedOpType op) const;
  // What `call` of c10d gives; its failure is RankLost, which says because of whom.
  template <class Call>
  auto named(const Call& call) const;
  const Backend& backend_of(const at::Tensor& tensor) const {
    return tensor.is_cpu() ? host_ : backend_;
  }

  Backend backend_, host_;
  c10::Device device_;
  RankWatch* watch_;
};

}  // namespace lln_torch
