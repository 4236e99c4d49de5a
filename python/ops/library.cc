// The ops of torch.ops.lln: their schemas. Kernels register themselves beside their code; autograd,
// autocast and shapes without data are registered by the Python package.
// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY(lln, m) {
  // -> o; key_lse and channel_values for the backward where `save`; alpha and beta where they were
  // matched.
  m.def(
      "forward(Tensor q, Tensor k, Tensor v, Tensor? alpha, Tensor? beta, Tensor? mix, "
      "Tensor? lln_weight, Tensor? diag_weight, Tensor? key_mask, Tensor? key_lengths, "
      "Tensor? query_mask, Tensor? cu_seqlens, Tensor? cu_seqlens_k, str kind, bool causal, "
      "float fixed_mix, str feature, str matching, bool save) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  // -> gradients of q, k, v, alpha, beta, mix, lln_weight, diag_weight.
  m.def(
      "backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor? alpha, Tensor? beta, Tensor? mix, "
      "Tensor? lln_weight, Tensor? diag_weight, Tensor? key_mask, Tensor? key_lengths, "
      "Tensor? cu_seqlens, Tensor? cu_seqlens_k, Tensor key_lse, Tensor channel_values, str kind, "
      "bool causal, float fixed_mix, str feature, bool scales_wanted, bool weights_wanted) "
      "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  // Moments f64 [key heads, 3]: count, mean, squared deviations -> alpha [heads], beta [key heads],
  // and how many key heads a limit was applied to.
  m.def(
      "calibrate_pooled(Tensor q_moments, Tensor k_moments, int heads, int dim, int sequences, str mode) "
      "-> (Tensor, Tensor, int)");
}
