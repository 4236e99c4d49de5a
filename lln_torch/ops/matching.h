// Moments of queries and keys, and the alpha and beta with which LLN attention concentrates as
// softmax attention does on them. No gradient flows through any of it.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>
#include <utility>

namespace lln_torch {

// Which tokens count, as in AttentionCall; tensors that are not defined are not given.
struct TokenChoice {
  at::Tensor key_mask;     // bool [batch, tokens_k]
  at::Tensor key_lengths;  // int32 or int64 [batch]
  at::Tensor query_mask;   // bool [batch, tokens]; in self-attention the keys' choice holds, too
  at::Tensor cu_seqlens, cu_seqlens_k;  // packed sequences
  bool cross = false;                   // q and k are of different tokens even where as many
};

struct MatchCall {
  std::string mode = "per_head";  // none, paper, per_head, exact, entropy, or ema from `running`
  TokenChoice tokens = {};
  bool causal = false;  // of the attention: refuses modes that read the whole sequence
  at::Tensor running;   // of mode ema: f64 [2, heads_k, 3], see update_moments
};

// alpha [S, heads] and beta [S, heads_k], S the batch or the packed sequences; f32, f64 with f64
// tensors.
std::pair<at::Tensor, at::Tensor> match_moments(const at::Tensor& q, const at::Tensor& k,
                                                const MatchCall& call = {});

// The same into tensors of the caller, which the shape and the type above must be of; of modes that
// read q and k alone.
void match_into(const at::Tensor& alpha, const at::Tensor& beta, const at::Tensor& q,
                const at::Tensor& k, const MatchCall& call = {});

// Running moments before the first step: zeros, weight, mean and variance of each key head, of q
// and then of k. A buffer of a module; it is saved and moved like any.
at::Tensor new_running_moments(std::int64_t heads_k, at::Device device = at::kCPU);
// Takes the moments of q and k into `running`, in place. Call it after match_moments, so that a
// step uses the steps before it; `decay` is the weight that a step leaves to those.
void update_moments(const at::Tensor& running, const at::Tensor& q, const at::Tensor& k,
                    const TokenChoice& tokens = {}, double decay = 0.99);

// Of each sequence and head over all channels of the tokens that count: f64 [S, heads], in host
// memory; with a tensor on a device this call waits for it.
struct HeadMoments {
  at::Tensor count;
  at::Tensor mean;
  at::Tensor variance;  // unbiased; 0 for fewer than two numbers
};
struct HeadTokens {
  at::Tensor mask;     // bool [batch, tokens]
  at::Tensor lengths;  // int32 or int64 [batch]
  at::Tensor cu_seqlens;
};
HeadMoments head_moments(const at::Tensor& x, const HeadTokens& tokens = {});

}  // namespace lln_torch
