// Attention over one piece of a sequence, on tensors and outside of autograd: (q, k, v, state) to
// (o, saved), and the gradients of all that goes in from those of all that comes out
// (docs/pieces.md). What exchanges states between pieces is built of these:
// lln_torch/parallel/sequence_attention.h.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <string>

namespace lln_torch {

// The state of a set of keys, or the gradient of one; f32, f64 with f64 tensors. Not defined: none.
struct TensorState {
  at::Tensor lse;     // [S, heads_k, 1, dim]
  at::Tensor values;  // [S, heads_k, dim, dim_v]
  bool defined() const { return lse.defined(); }
};

// Arguments as those of AttentionCall in attention.h, with the kind in the core's words: lln,
// diag64, lln+diag64. alpha and beta are given where the kind has LLN.
struct PieceCall {
  at::Tensor q, k, v;
  at::Tensor alpha, beta;
  at::Tensor mix, lln_weight, diag_weight;
  at::Tensor key_lengths, key_mask;
  at::Tensor cu_seqlens, cu_seqlens_k;
  at::Tensor block_origins;  // int32 or int64 [S]: where blocks are counted from; not defined:
                             // where keys begin to count
  std::string kind = "lln";
  bool causal = false;
  double fixed_mix = 0.5;
  std::string feature = "exp";
};

// Results go into tensors of the caller; a state that is not defined is not written.
void piece_forward(const PieceCall& call, const TensorState& state, const at::Tensor& o,
                   const TensorState& saved);

struct PieceGradients {
  at::Tensor q, k, v;
  // Where they are wanted.
  at::Tensor alpha, beta;
  at::Tensor mix, lln_weight, diag_weight;
  TensorState state;
};
void piece_backward(const at::Tensor& g, const TensorState& dsaved, const PieceCall& call,
                    const TensorState& state, const PieceGradients& gradients);

// Moments f64 [S, heads, 3] and [S, heads_k, 3] in host memory, joined over pieces: count, mean and
// squared deviations -> alpha [S, heads] and beta [S, heads_k], on the device of `like` and in the
// type that goes with it.
struct MatchedTensors {
  at::Tensor alpha, beta;
};
MatchedTensors match_joined(const at::Tensor& q_moments, const at::Tensor& k_moments,
                            const at::Tensor& like, const std::string& mode, bool causal,
                            const std::string& feature);
// Moments of a piece in that form, [S, heads, 3].
at::Tensor piece_moments(const at::Tensor& x, const at::Tensor& mask, const at::Tensor& lengths,
                         const at::Tensor& cu_seqlens);
// Joined moments into running ones (matching.h), in place.
void update_joined(const at::Tensor& running, const at::Tensor& q_moments,
                   const at::Tensor& k_moments, std::int64_t dim, double decay);

}  // namespace lln_torch
