// The ops of torch.ops.lln: their schemas. Their kernels are registered in kernels.cc; autograd,
// autocast and shapes without data are registered by the Python package.
// SPDX-License-Identifier: Apache-2.0
#include <torch/csrc/stable/library.h>

// `mix` is the weight of LLN where diag_weight is given, otherwise the share of LLN in LLN+Diag.
// `keys` says which keys count: a mask bool [batch, tokens], or lengths [batch].
#define LLN_INPUTS                                                                                \
  "Tensor q, Tensor k, Tensor v, Tensor? alpha, Tensor? beta, Tensor? mix, Tensor? diag_weight, " \
  "Tensor? keys, Tensor? cu_seqlens, Tensor? cu_seqlens_k, "
// Of the rest of a sequence: the state of its keys, and where blocks are counted from.
#define LLN_REST "Tensor? state_lse, Tensor? state_values, Tensor? block_origins, "
#define LLN_OPTIONS "str kind, bool causal, float fixed_mix, str feature"
// Where alpha and beta are no tensors they are these numbers; without numbers they are matched by
// the mode `matching`, which query_mask is for.
#define LLN_SCALES \
  ", str matching, Tensor? query_mask=None, float? fixed_alpha=None, float? fixed_beta=None"
// A decode state: bytes, int64 counts of tokens, and its configuration, where `sizes` are batch,
// heads, heads_k, dim and dim_v.
#define LLN_STATE "Tensor memory, Tensor tokens, "
#define LLN_CHANGED_STATE "Tensor(a!) memory, Tensor(b!) tokens, "
#define LLN_CONFIG "int[] sizes, str kind, float fixed_mix, str feature"

STABLE_TORCH_LIBRARY(lln, m) {
  m.def("attention(" LLN_INPUTS LLN_OPTIONS LLN_SCALES ") -> Tensor");
  // The same with what the backward takes: o, key_lse and channel_values, and alpha and beta where
  // they were made here, [1, 1] of a number.
  m.def("forward(" LLN_INPUTS LLN_OPTIONS LLN_SCALES
        ") -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  // -> gradients of q, k, v, alpha, beta, mix, diag_weight.
  m.def("backward(Tensor g, " LLN_INPUTS "Tensor key_lse, Tensor channel_values, " LLN_OPTIONS
        ", bool scales_wanted, bool weights_wanted) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");

  // One piece of a sequence, with states for what lies elsewhere: into o and the state of all keys.
  m.def("piece_forward(Tensor(a!) o, Tensor(b!)? saved_lse, Tensor(c!)? saved_values, " LLN_INPUTS
            LLN_REST LLN_OPTIONS ") -> ()");
  // Into the gradients of all arguments, from those of o and of the state of all keys.
  m.def(
      "piece_backward(Tensor(a!) dq, Tensor(b!) dk, Tensor(c!) dv, Tensor(d!)? dalpha, "
      "Tensor(e!)? dbeta, Tensor(f!)? dmix, Tensor(g!)? ddiag_weight, Tensor(h!)? dstate_lse, "
      "Tensor(i!)? dstate_values, Tensor g, Tensor? dsaved_lse, Tensor? dsaved_values, " LLN_INPUTS
          LLN_REST LLN_OPTIONS ") -> ()");

  // -> alpha [S, heads], beta [S, heads_k].
  m.def(
      "match(Tensor q, Tensor k, Tensor? keys, Tensor? query_mask, Tensor? cu_seqlens, "
      "Tensor? cu_seqlens_k, Tensor? running, str mode, bool causal, bool cross) "
      "-> (Tensor, Tensor)");
  m.def(
      "update_moments(Tensor(a!) running, Tensor q, Tensor k, Tensor? keys, Tensor? query_mask, "
      "Tensor? cu_seqlens, Tensor? cu_seqlens_k, float decay, bool cross) -> ()");
  // Of moments f64 [S, heads, 3] and [S, heads_k, 3] that were taken in pieces: count, mean,
  // squared deviations.
  m.def(
      "match_joined(Tensor q_moments, Tensor k_moments, int dim, str mode, bool causal, "
      "str feature, bool wide) -> (Tensor, Tensor)");
  m.def(
      "update_joined(Tensor(a!) running, Tensor q_moments, Tensor k_moments, int dim, float decay) "
      "-> ()");
  m.def("head_moments(Tensor x, Tensor? tokens, Tensor? cu_seqlens) -> Tensor");
  // Moments f64 [heads_k, 3]: count, mean, squared deviations -> alpha [heads], beta [heads_k], and
  // the number of key heads that a limit was applied to, [].
  m.def(
      "calibrate(Tensor q_moments, Tensor k_moments, int heads, int dim, int sequences, str mode) "
      "-> (Tensor, Tensor, Tensor)");

  m.def("decode_bytes(int[] sizes, str kind, str feature, bool on_device) -> int");
  m.def("decode_append(" LLN_CHANGED_STATE
        "Tensor? q, Tensor k, Tensor v, Tensor? alpha, Tensor? beta, Tensor? mix, "
        "Tensor? diag_weight, Tensor? lengths, " LLN_CONFIG ") -> Tensor");
  m.def("decode_step(" LLN_CHANGED_STATE
        "Tensor q, Tensor k, Tensor v, Tensor? alpha, Tensor? beta, Tensor? mix, "
        "Tensor? diag_weight, " LLN_CONFIG ") -> Tensor");
  m.def("decode_read(" LLN_STATE
        "Tensor q, Tensor? alpha, Tensor? mix, Tensor? diag_weight, " LLN_CONFIG ") -> Tensor");
  m.def("decode_reset(" LLN_CHANGED_STATE "int sequence, " LLN_CONFIG ") -> ()");
  m.def("decode_merge(" LLN_CHANGED_STATE "Tensor later, Tensor later_tokens, " LLN_CONFIG
        ") -> ()");
  m.def("decode_tokens(" LLN_STATE LLN_CONFIG ") -> Tensor");
  m.def("decode_save(" LLN_STATE LLN_CONFIG ") -> Tensor");
  m.def("decode_load(" LLN_CHANGED_STATE "Tensor bytes, " LLN_CONFIG ") -> ()");

  // -> the bytes of JSON.
  m.def(
      "analyze(Tensor q, Tensor k, Tensor? alpha, Tensor? beta, str kinds, str matching, "
      "bool causal, int rows, int layer, str name) -> Tensor");
}
