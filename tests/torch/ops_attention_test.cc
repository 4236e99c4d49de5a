// attention() of tensors against a plain evaluation.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include "lln_torch/ops/attention.h"

namespace {

TEST(Attention, Runs) {
  at::Tensor q = at::randn({2, 4, 128, 32}).requires_grad_();
  const at::Tensor o = lln_torch::attention(q, q, q);
  o.sum().backward();
  EXPECT_EQ(q.grad().sizes(), q.sizes());
}

}  // namespace
