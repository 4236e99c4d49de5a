// LLN attention as a function of tensors with gradients: torch::autograd::Functions over the core.
// Views of any layout are taken without copies as long as channels are contiguous; CPU and CUDA, on
// the current stream, without synchronisation. Errors are lln::Error with the core's text.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>

namespace lln_torch {

// What a call takes besides q, k and v. Tensors that are not defined are not given.
struct AttentionCall {
  // 0: LLN alone. Otherwise the block of the block-diagonal part.
  std::int64_t diag_block = 0;
  bool causal = false;
  std::string feature = "exp";
  // Where alpha and beta come from that are not given: none, paper, per_head, exact, entropy.
  std::string matching = "per_head";
  double fixed_mix = 0.5;               // share of LLN where mix is not given; 0 is Diag alone
  at::Tensor alpha, beta;               // [heads] or [sequences, heads]; gradients flow to them
  at::Tensor mix;                       // [], [heads], [heads, channels] or [batch, heads, tokens]
  at::Tensor lln_weight, diag_weight;   // in place of mix
  at::Tensor key_mask;                  // bool [batch, tokens], True where a key counts
  at::Tensor key_lengths;               // int32 or int64 [batch]
  at::Tensor query_mask;                // bool [batch, tokens], for the moments alone
  at::Tensor cu_seqlens, cu_seqlens_k;  // packed sequences: batch is 1
};

// q [batch, heads, tokens, dim], k and v [batch, heads_k, tokens_k, dim or dim_v] -> o [batch,
// heads, tokens, dim_v] of the type of q. Under autocast q, k and v are taken in its type.
at::Tensor attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                     const AttentionCall& call = {});

// alpha [sequences, heads] and beta [sequences, heads_k] that the matching of `call` gives.
std::pair<at::Tensor, at::Tensor> match(const at::Tensor& q, const at::Tensor& k,
                                        const AttentionCall& call);

}  // namespace lln_torch
