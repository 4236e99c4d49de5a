// Forward and backward are the same sum.
// SPDX-License-Identifier: Apache-2.0
#include "lln_torch/parallel/sum_over_ranks.h"

#include <ATen/ATen.h>
#include <torch/csrc/autograd/custom_function.h>

#include "lln/error.h"

namespace lln_torch {
namespace {

at::Tensor summed(const at::Tensor& x, const RankGroup& group) {
  at::Tensor sum = x.clone(at::MemoryFormat::Contiguous);
  if (group.size() > 1) group.wait(group.begin_sum(sum));
  return sum;
}

struct RankSum : torch::autograd::Function<RankSum> {
  static at::Tensor forward(torch::autograd::AutogradContext* ctx, const at::Tensor& x,
                            const RankGroup* group) {
    ctx->saved_data["group"] = reinterpret_cast<std::int64_t>(group);
    return summed(x, *group);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 const torch::autograd::variable_list& g) {
    if (at::GradMode::is_enabled()) {
      throw lln::Error(lln::ErrorCode::unsupported,
                       "gradients of gradients of a sum over ranks are not available");
    }
    const auto* const group = reinterpret_cast<const RankGroup*>(ctx->saved_data["group"].toInt());
    return {summed(g[0], *group), {}};
  }
};

}  // namespace

at::Tensor sum_over_ranks(const at::Tensor& x, const RankGroup& group) {
  return RankSum::apply(x, &group);
}

}  // namespace lln_torch
