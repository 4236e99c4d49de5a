// A program of a user of lln::torch: one training step of attention, one step of decoding, and
// attention over the only piece of a sequence.
// SPDX-License-Identifier: Apache-2.0
#include <ATen/ops/randn.h>
#include <lln/error.h>
#include <lln_torch/ops/attention.h>
#include <lln_torch/ops/calibration.h>
#include <lln_torch/ops/decode.h>
#include <lln_torch/ops/instruments.h>
#include <lln_torch/ops/matching.h>
#include <lln_torch/parallel/backend.h>
#include <lln_torch/parallel/sequence_attention.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chrono>
#include <cstdio>

int main() {
  const at::Tensor q = at::randn({1, 2, 64, 16}).requires_grad_();
  lln_torch::AttentionCall call;
  call.diag_block = 16;
  lln_torch::attention(q, q, q, call).sum().backward();
  if (!q.grad().defined()) return 1;

  lln_torch::DecodeOptions options;
  options.heads = 2;
  options.dim = 16;
  lln_torch::DecodeState state(options);
  const at::Tensor token = at::randn({1, 2, 1, 16});
  if (state.step(token, token, token).sizes() != token.sizes()) return 2;
  if (lln_torch::analyze(q, q).empty()) return 3;

  const lln_torch::Store store = c10::make_intrusive<c10d::HashStore>();
  const lln_torch::RankGroup group(lln_torch::make_gloo(store, 0, 1, std::chrono::seconds(60)),
                                   at::kCPU);
  const lln_torch::Pieces pieces(group, 64);
  const at::Tensor uncut = lln_torch::attention(q, q, q, call);
  if (!lln_torch::attention(q, q, q, call, pieces).allclose(uncut, 1e-4, 1e-5)) return 5;

  try {
    lln_torch::attention(q, at::randn({1, 2, 64, 8}), q);
  } catch (const lln::Error& error) {
    std::puts(error.what());
    return 0;
  }
  return 4;
}
