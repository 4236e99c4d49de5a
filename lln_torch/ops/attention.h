// LLN attention as a function of tensors with gradients: torch::autograd::Functions over the core.
// Views of any layout are taken without copies as long as channels are contiguous; CPU and CUDA, on
// torch's threads and in its current stream, without synchronisation. Errors are lln::Error with
// the core's text.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

namespace lln_torch {

class StateAgain;  // side_work.h

// What a call takes besides q, k and v. Tensors that are not defined are not given. Below, S is the
// number of sequences: the batch, or the packed sequences.
struct AttentionCall {
  // 0: LLN alone. Otherwise the block of the block-diagonal part.
  std::int64_t diag_block = 0;
  bool causal = false;
  std::string feature = "exp";  // exp, elu, relu, softplus, or power2 and other powers
  // Where alpha and beta come from that are not given: none, paper, per_head, exact or entropy;
  // auto is per_head, and none for features other than exp. No gradient flows through them.
  std::string matching = "auto";
  double fixed_mix = 0.5;  // share of LLN where mix is not given; 0 is Diag alone
  // Scales of queries and keys, both or none: [], [heads] or [S, heads] of the queries or the keys.
  // Gradients flow to them and to the weights below, and are computed only where they are wanted.
  at::Tensor alpha, beta;
  std::optional<double> fixed_alpha, fixed_beta;  // as one number each, in place of tensors
  at::Tensor mix;                      // [], [heads], [heads, dim_v] or [batch, heads, tokens]
  at::Tensor lln_weight, diag_weight;  // in place of mix
  at::Tensor key_mask;                 // bool [batch, tokens_k], true where a key counts
  at::Tensor key_lengths;              // int32 or int64 [batch]
  at::Tensor query_mask;               // bool [batch, tokens], for the moments alone
  // Packed sequences, int32 or int64 [S + 1]: batch is 1. Those of the keys where they differ.
  at::Tensor cu_seqlens, cu_seqlens_k;
  // Of bidirectional calls that are not packed. Given: the forward pass keeps no state of the keys;
  // the backward pass takes it from here, where begin() was called before it, or sums them again.
  std::shared_ptr<StateAgain> state_again = {};
};

// The mode of matching that a call without alpha and beta has: auto by its feature.
std::string matching_of(const AttentionCall& call);

// q [batch, heads, tokens, dim], k and v [batch, heads_k, tokens_k, dim or dim_v] -> o [batch,
// heads, tokens, dim_v] of the type of q and in its order in memory. Under autocast q, k and v are
// taken in its type; scales and weights keep theirs. A row without a key that counts is zero, and
// so are its gradients. f64 runs in the reference kernels, which are slow. For a backward pass
// nothing of the size of the sequence is kept besides the arguments; a second derivative is
// refused.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttentionCall& call = {});

// The peer to compare with: softmax(q k^T / sqrt(dim)) v of the same core. Of `call` it takes
// causal, key_mask, key_lengths and cu_seqlens.
at::Tensor softmax_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                             const AttentionCall& call = {});

// alpha [S, heads] and beta [S, heads_k] that `attention` would take with this call; see
// matching.h.
std::pair<at::Tensor, at::Tensor> match(const at::Tensor& q, const at::Tensor& k,
                                        const AttentionCall& call);

}  // namespace lln_torch
