// Buckets of gradients and the hooks that send them. The hooks of one device run in one thread, and
// begin() and finish() lie before and after the pass, so that nothing needs a lock.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/parallel/gradient_exchange.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <memory>

namespace lln_torch {
namespace {

// At the head of the first bucket that is sent: weight, loss, wish to stop.
constexpr std::int64_t kHead = 3;
// Elements that gradients are aligned to, as memory of their own would be.
constexpr std::int64_t kAlign = 16;

std::int64_t aligned(std::int64_t elements) { return (elements + kAlign - 1) / kAlign * kAlign; }

}  // namespace

// Called by torch after a gradient was added to that of its parameter.
class GradientExchange::Hook : public torch::autograd::PostAccumulateGradHook {
 public:
  Hook(GradientExchange& exchange, std::size_t bucket) : exchange_(exchange), bucket_(bucket) {}
  void operator()(const at::Tensor&) override { exchange_.gradient_ready(bucket_); }

 private:
  GradientExchange& exchange_;
  std::size_t bucket_;
};

GradientExchange::GradientExchange(const RankGroup& group, std::vector<at::Tensor> parameters,
                                   std::int64_t bucket_bytes)
    : group_(group), parameters_(std::move(parameters)) {
  // The last parameters get their gradients first.
  std::reverse(parameters_.begin(), parameters_.end());
  std::vector<at::Tensor> together;
  std::int64_t bytes = 0;
  for (const at::Tensor& parameter : parameters_) {
    const std::int64_t more = static_cast<std::int64_t>(parameter.nbytes());
    const bool other_type =
        !together.empty() && together.back().scalar_type() != parameter.scalar_type();
    if (!together.empty() && (bytes + more > bucket_bytes || other_type)) {
      fill(together, buckets_.empty() ? kHead : 0);
      bytes = 0;
    }
    together.push_back(parameter);
    bytes += more;
  }
  fill(together, buckets_.empty() ? kHead : 0);
}

void GradientExchange::fill(std::vector<at::Tensor>& parameters, std::int64_t reserved) {
  const at::NoGradGuard no_gradients;
  std::int64_t elements = aligned(reserved);
  for (const at::Tensor& parameter : parameters) elements += aligned(parameter.numel());
  Bucket bucket;
  bucket.memory = at::zeros({elements}, parameters.front().grad().options());
  std::int64_t offset = aligned(reserved);
  for (at::Tensor& parameter : parameters) {
    at::Tensor gradient = parameter.mutable_grad();
    gradient.set_(bucket.memory.storage(), offset, gradient.sizes().vec(),
                  gradient.strides().vec());
    offset += aligned(parameter.numel());
    torch::autograd::impl::set_post_acc_grad_hooks(parameter,
                                                   std::make_unique<Hook>(*this, buckets_.size()));
  }
  bucket.gradients = static_cast<std::int64_t>(parameters.size());
  buckets_.push_back(std::move(bucket));
  parameters.clear();
}

GradientExchange::~GradientExchange() {
  for (const at::Tensor& parameter : parameters_) {
    torch::autograd::impl::set_post_acc_grad_hooks(parameter, nullptr);
  }
}

void GradientExchange::begin(const at::Tensor& loss, double weight, bool stop) {
  const at::NoGradGuard no_gradients;
  at::Tensor& head = buckets_.front().memory;
  head[0].fill_(weight);
  head[1].copy_(loss);
  head[2].fill_(stop ? 1 : 0);
  for (Bucket& bucket : buckets_) bucket.missing = bucket.gradients;
  next_ = 0;
  sending_ = true;
}

void GradientExchange::gradient_ready(std::size_t bucket) {
  if (!sending_) return;  // a pass over an earlier part of the batch, or one that is no step
  --buckets_[bucket].missing;
  send_ready();
}

void GradientExchange::send_ready() {
  while (next_ < buckets_.size() && buckets_[next_].missing <= 0) {
    buckets_[next_].work = group_.begin_sum(buckets_[next_].memory);
    ++next_;
  }
}

GradientExchange::Totals GradientExchange::finish() {
  const at::NoGradGuard no_gradients;
  sending_ = false;
  // Parameters that the pass did not reach have no hook that ran.
  for (Bucket& bucket : buckets_) bucket.missing = 0;
  send_ready();
  for (const Bucket& bucket : buckets_) group_.wait(bucket.work);
  const at::Tensor& head = buckets_.front().memory;
  // Where nothing at all was predicted the sums are 0.
  const at::Tensor weight = at::clamp_min(head[0], 1).clone();
  Totals totals{head[1] / weight, head[2].clone()};
  for (Bucket& bucket : buckets_) {
    bucket.work.reset();
    bucket.memory.div_(weight);
  }
  return totals;
}

}  // namespace lln_torch
