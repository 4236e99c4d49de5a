// Exchange of tensors among the ranks of a group. A failed exchange becomes an error that names the
// rank at fault. A job may have several groups, as the rows and columns of a mesh.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
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

  // The watch outlives this object.
  RankGroup(Backend backend, const c10::Device& device, RankWatch& watch)
      : backend_(std::move(backend)), device_(device), watch_(&watch) {}

  int rank() const { return backend_->getRank(); }
  int size() const { return backend_->getSize(); }
  bool first() const { return rank() == 0; }
  const c10::Device& device() const { return device_; }  // of the tensors that it takes
  RankWatch& watch() const { return *watch_; }

  // Begins to sum a contiguous tensor over all ranks, in place; it may not be touched until wait().
  Work begin_sum(const at::Tensor& tensor) const;
  void wait(const Work& work) const;
  // The tensor of rank `root` to all.
  void broadcast(const at::Tensor& tensor, int root) const;

 private:
  Backend backend_;
  c10::Device device_;
  RankWatch* watch_;
};

}  // namespace lln_torch
