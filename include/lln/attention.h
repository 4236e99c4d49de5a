// Linear Log-Normal attention, block-diagonal softmax attention and their mixture, forward and
// backward; and plain softmax attention as the peer to compare with. For one head
//
//   LLN      P_ij ~ sum_l phi(alpha q_il) phi(beta k_jl),  rows normalised;  phi = exp by default
//   Diag     softmax(q k^T / sqrt(dim)) inside consecutive blocks of tokens, nothing across
//   LLN+Diag w1 * LLN + w2 * Diag
//
// Rows without a valid key are zero and have zero gradients. LLN does not overflow for any finite
// input; the scores q . k of Diag and softmax must be finite in f32.
// All calls may run at the same time on different outputs; outputs must not overlap inputs.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lln/exec.h"
#include "lln/problem.h"
#include "lln/tensor.h"

namespace lln {

struct AttentionOptions {
  Kind kind = Kind::lln;
  std::int64_t diag_block = 64;    // of Diag and LLN+Diag
  bool causal = false;             // row i sees keys j <= i
  Feature feature = Feature::exp;  // of LLN
  float power = 2;                 // of Feature::power
  float mix = 0.5F;                // LLN+Diag: w1 = mix, w2 = 1 - mix, where no tensor gives them
};

// Below, S is the number of sequences: the batch, or when packed the number of packed sequences.
struct AttentionInputs {
  ConstView q = {};  // [batch, heads, tokens, dim]
  ConstView k = {};  // [batch, heads_k, tokens_k, dim]
  ConstView v = {};  // [batch, heads_k, tokens_k, dim_v]

  // Required by LLN, f32 (f64 with f64 tensors), finite; a dimension may be 1 to broadcast.
  ConstView alpha = {};  // [S, heads, 1, 1]
  ConstView beta = {};   // [S, heads_k, 1, 1]

  // Weights of the two parts of LLN+Diag: mix (w1 = mix, w2 = 1 - mix) or both weights; f32. One of
  // [1,1,1,1] per call, [1,heads,1,1] per head, [1,heads,1,dim_v] per head and channel,
  // [batch,heads,tokens,1] per head and token.
  ConstView mix = {};
  ConstView lln_weight = {};
  ConstView diag_weight = {};

  // Which keys count: the first key_lengths[b] keys, or those with a nonzero mask byte.
  IndexView key_lengths = {};  // [batch]
  MaskView key_mask = {};      // [batch, tokens_k]

  // Packed sequences: batch 1, sequence s holds rows cu_seqlens_q[s] to cu_seqlens_q[s+1] of q and
  // the same of cu_seqlens_k in k and v (cu_seqlens_q where cu_seqlens_k is not given). Sequences
  // may be empty. The first entry is 0, the last the number of tokens.
  IndexView cu_seqlens_q = {};  // [S + 1]
  IndexView cu_seqlens_k = {};  // [S + 1]
};

// What the backward pass of LLN can reuse; nothing of the size of the sequence. f64 with f64
// tensors. Written by the bidirectional forward; in the causal one it is the state after the last
// token.
struct AttentionSaved {
  View key_lse = {};  // f32 [S, heads_k, 1, dim]: c_l = logsumexp over keys of ln phi(beta k_jl)
  View channel_values = {};  // f32 [S, heads_k, dim, dim_v]: C = softmax over keys of that, times v
};

struct AttentionOutputs {
  View o = {};                // [batch, heads, tokens, dim_v]
  AttentionSaved saved = {};  // optional, both or none
};

struct AttentionGradients {
  ConstView g = {};  // dL/do, [batch, heads, tokens, dim_v]
  // From the bidirectional forward of the same inputs; recomputed where not given. The causal
  // backward needs the states inside the sequence and recomputes them always.
  AttentionSaved saved = {};
  View dq = {}, dk = {}, dv = {};  // shaped like q, k, v
  // On request, shaped and typed like the inputs that they belong to.
  View dalpha = {}, dbeta = {};
  View dmix = {}, dlln_weight = {}, ddiag_weight = {};
};

// Check everything once and say what the call computes; throw one Error naming every fault.
Problem make_problem(const AttentionInputs& in, const AttentionOutputs& out,
                     const AttentionOptions& options);
Problem make_problem(const AttentionInputs& in, const AttentionGradients& grads,
                     const AttentionOptions& options);

// O(tokens) time for LLN and Diag; extra memory is workspace_bytes(make_problem(...), exec).
void attention_forward(const AttentionInputs& in, const AttentionOutputs& out,
                       const AttentionOptions& options, const Exec& exec = {});
void attention_backward(const AttentionInputs& in, const AttentionGradients& grads,
                        const AttentionOptions& options, const Exec& exec = {});

}  // namespace lln
