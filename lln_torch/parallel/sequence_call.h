// What the two forms of attention over pieces share: one call, and the heads that are done
// together.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/custom_function.h>

#include <string>
#include <utility>
#include <vector>

#include "lln_torch/ops/pieces.h"
#include "lln_torch/parallel/pieces.h"

namespace lln_torch {

// q, k, v with contiguous channels. alpha is [1 or S, heads], beta [1 or S, heads_k].
struct SequenceCall {
  std::int64_t diag_block = 0;
  std::string feature = "exp";
  bool causal = false;
  double fixed_mix = 0.5;
  Pieces pieces;
};

// Kept with the graph for the backward pass.
void keep_call(torch::autograd::AutogradContext& ctx, const SequenceCall& call);
// Throws where gradients of gradients are wanted. Lives as long as the context.
const SequenceCall& kept_call(torch::autograd::AutogradContext& ctx);

// Some key heads, and the query heads that share them. A call is done in two parts where it can be,
// so that one is exchanged while the other is computed.
struct HeadPart {
  std::int64_t first = 0, count = 0;  // key heads
  std::int64_t group = 1;             // query heads of each
  int number = 0;
  at::Tensor of_keys(const at::Tensor& x) const { return x.narrow(1, first, count); }
  at::Tensor of_rows(const at::Tensor& x) const {
    return x.narrow(1, first * group, count * group);
  }
};
std::vector<HeadPart> head_parts(std::int64_t heads, std::int64_t heads_k);

TensorState state_part(const HeadPart& part, const TensorState& state);
// States of all heads from those of parts.
TensorState join_states(const std::vector<TensorState>& parts);

// Empty memory for a state of the heads of k, [S, heads_k, ...].
TensorState new_state(const at::Tensor& k, const at::Tensor& v, const Pieces& pieces);

// Empty memory for rows of v, in the order of q in memory.
at::Tensor rows_like(const at::Tensor& q, const at::Tensor& v);

// The keys of a part alone, and its rows alone: LLN, not causal.
PieceCall keys_call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const at::Tensor& alpha, const at::Tensor& beta, const SequenceCall& call,
                    const HeadPart& part);
PieceCall rows_call(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                    const at::Tensor& alpha, const at::Tensor& beta, const SequenceCall& call,
                    const HeadPart& part);
// The state of the keys of a part.
TensorState state_of_keys(const PieceCall& keys, const Pieces& pieces);
// From the gradient of that state: dk and dv into the part of these, dbeta where it is defined.
void keys_backward(const PieceCall& keys, const TensorState& gradient, const at::Tensor& dk,
                   const at::Tensor& dv, const at::Tensor& dbeta);

// (L, Diag): LLN over all pieces, and the block-diagonal part where the call has blocks, otherwise
// not defined.
std::pair<at::Tensor, at::Tensor> whole_attention(const at::Tensor& q, const at::Tensor& k,
                                                  const at::Tensor& v, const at::Tensor& alpha,
                                                  const at::Tensor& beta, const SequenceCall& call);

// The block-diagonal part alone, which sees no other piece.
at::Tensor blocks_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const SequenceCall& call);

struct CausalWeights {
  at::Tensor mix, lln_weight, diag_weight;  // as the core takes them, with heads
};
at::Tensor causal_attention(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v,
                            const at::Tensor& alpha, const at::Tensor& beta,
                            const CausalWeights& weights, const SequenceCall& call);

}  // namespace lln_torch
