// Linear Log-Normal attention, block-diagonal softmax attention and their mixture, forward and
// backward; and plain softmax attention as the peer to compare with. For one head
//
//   LLN      P_ij ~ sum_l phi(alpha q_il) phi(beta k_jl),  rows normalised;  phi = exp by default
//   Diag     softmax(q k^T / sqrt(dim)) inside consecutive blocks of tokens, nothing across
//   LLN+Diag w1 * LLN + w2 * Diag
//
// A long sequence may be cut into pieces, each with its own calls: the keys of a piece become a
// state (AttentionSaved), states of pieces merge, and rows read what they are given of them
// (AttentionInputs::state). Both halves have gradients, with that of the state between them.
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

// The state of a set of keys, all that LLN needs to know of them: nothing of the size of the
// sequence. f64 with f64 tensors. No keys are key_lse = -inf and channel_values = 0. The states of
// two sets become that of their union by
//   key_lse = logaddexp(c1, c2),  channel_values = exp(c1 - key_lse) C1 + exp(c2 - key_lse) C2.
struct AttentionSaved {
  View key_lse = {};  // f32 [S, heads_k, 1, dim]: c_l = logsumexp over keys of ln phi(beta k_jl)
  View channel_values = {};  // f32 [S, heads_k, dim, dim_v]: C = softmax over keys of that, times v
};

// The same, or the gradient of one, to be read.
struct AttentionState {
  ConstView key_lse = {};
  ConstView channel_values = {};
  bool given() const noexcept { return key_lse.given() || channel_values.given(); }
};

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

  // Optional, of LLN: keys that are not in k and v, which every row sees, causal or not, beside
  // those of k. Channels with key_lse = -inf hold no keys, and nothing else of them is read. With
  // no tokens in k the rows read this state alone. Diag does not see these keys.
  AttentionState state = {};

  // Optional, of Diag and LLN+Diag: where the blocks of a sequence are counted from; 0 is its first
  // token in this call, and any integer is taken. Blocks begin there and at every diag_block tokens
  // after it; tokens before it are in no block. Without it, the first valid key. A piece is given
  // the first valid key of the whole sequence, which may lie before the piece or behind it.
  IndexView block_origins = {};  // [S]
};

struct AttentionOutputs {
  View o = {};  // [batch, heads, tokens, dim_v]
  // Optional, both or none: the state of all keys, those of the given state and those of k. The
  // bidirectional backward can reuse it. With no tokens in q it is all that is computed.
  AttentionSaved saved = {};
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
  AttentionSaved dstate = {};  // of the given state, both or none; zero in channels without keys
  // Optional, both or none, to be read: dL/d of the state that the forward saved, where something
  // depends on it. Nothing is read of channels without keys.
  AttentionState dsaved = {};
};

// Check everything once and say what the call computes; throw one Error naming every fault.
Problem make_problem(const AttentionInputs& in, const AttentionOutputs& out,
                     const AttentionOptions& options);
Problem make_problem(const AttentionInputs& in, const AttentionGradients& grads,
                     const AttentionOptions& options);

// Scratch memory of this call, in bytes: what workspace_bytes() says for its problem or less, since
// the problem does not show what few calls have, such as unaligned tensors on a device.
std::size_t workspace_bytes(const AttentionInputs& in, const AttentionOutputs& out,
                            const AttentionOptions& options, const Exec& exec = {});
std::size_t workspace_bytes(const AttentionInputs& in, const AttentionGradients& grads,
                            const AttentionOptions& options, const Exec& exec = {});

// O(tokens) time for LLN and Diag; extra memory is workspace_bytes().
void attention_forward(const AttentionInputs& in, const AttentionOutputs& out,
                       const AttentionOptions& options, const Exec& exec = {});
void attention_backward(const AttentionInputs& in, const AttentionGradients& grads,
                        const AttentionOptions& options, const Exec& exec = {});

}  // namespace lln
