// Gradients summed over the ranks that train on parts of one batch. They lie in a few buckets of
// memory; a bucket is sent as soon as the backward pass has filled it, while the pass goes on.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <vector>

#include "lln_torch/parallel/rank_group.h"

namespace lln_torch {

class GradientExchange {
 public:
  static constexpr std::int64_t kBucketBytes = std::int64_t{16} << 20;

  // Each parameter has a gradient, whose memory is moved into the buckets: the tensors stay the
  // same. The group outlives this object, and one exchange at a time has the parameters.
  GradientExchange(const RankGroup& group, std::vector<at::Tensor> parameters,
                   std::int64_t bucket_bytes = kBucketBytes);
  ~GradientExchange();
  GradientExchange(const GradientExchange&) = delete;
  GradientExchange& operator=(const GradientExchange&) = delete;

  // Before the last backward pass of a step. The gradients of this rank, and `loss`, are sums that
  // count by `weight`; `stop` is whether this rank wants to end.
  void begin(const at::Tensor& loss, double weight, bool stop);

  struct Totals {
    at::Tensor loss;  // the mean over all ranks, a scalar on the device
    at::Tensor stop;  // how many ranks want to end
  };
  // After it: waits, and makes the gradients means over all ranks, the same on each.
  Totals finish();

  std::int64_t buckets() const { return static_cast<std::int64_t>(buckets_.size()); }

 private:
  struct Bucket {
    at::Tensor memory;
    std::int64_t gradients = 0;  // that it holds
    std::int64_t missing = 0;    // of them, in this pass
    RankGroup::Work work;
  };
  class Hook;
  void fill(std::vector<at::Tensor>& parameters, std::int64_t reserved);
  void gradient_ready(std::size_t bucket);
  void send_ready();

  const RankGroup& group_;
  std::vector<at::Tensor> parameters_;
  std::vector<Bucket> buckets_;  // in the order that they are sent in, the same on all ranks
  std::size_t next_ = 0;         // bucket to be sent
  bool sending_ = false;
};

}  // namespace lln_torch
